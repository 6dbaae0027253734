"""What the `redis` timer does inside Redis: each script is one step of all movers and producers of one slot.

A slot has two sorted sets. In `store` entries wait, by their due time in milliseconds. In `prepare` are those that a
mover took and has not handed on yet, by the time at which they go back to `store` when it never does. An entry is in
one of them at most. `store` always has the member "." as its last one, which tells an empty slot from one that was
lost.
"""

from __future__ import annotations

#: Members in one call: Lua's stack takes a few thousand values.
BATCH_ROWS = 1000

#: KEYS: store, prepare. ARGV: channel, the slot's name, then score and member of each entry, the earliest first.
#: Idempotent. Movers are told only when the slot has something to do earlier than before, and when it was lost.
ARM = """
local is_lost = not redis.call('ZSCORE', KEYS[1], '.')
local is_earliest = redis.call('ZCOUNT', KEYS[1], '-inf', ARGV[3]) == 0
redis.call('ZADD', KEYS[1], unpack(ARGV, 3))
if redis.call('EXISTS', KEYS[2]) == 1 then
  for i = 4, #ARGV, 2 do redis.call('ZREM', KEYS[2], ARGV[i]) end
end
if is_lost or is_earliest then redis.call('PUBLISH', ARGV[1], ARGV[2] .. ' ' .. (is_lost and 0 or ARGV[3])) end
"""

#: KEYS: store, prepare. ARGV: now, until when an entry is too late, until when to take, when to return what is not
#: handed on, how many.
#: Answers: whether the slot was lost; what came back; what was too late, and its priorities; this taking's ticket;
#: due times and members; when to look again.
TAKE = f"""
local store, prepare, now, late, soon = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local back, most = tonumber(ARGV[4]), ARGV[5]
-- A write that takes no memory: after it a Redis that is full lets the others through, or nothing could leave it.
redis.call('ZREM', prepare, '.')
local was_lost = redis.call('ZADD', store, 'NX', '+inf', '.')

local stale = redis.call('ZRANGEBYSCORE', prepare, '-inf', now, 'LIMIT', 0, {BATCH_ROWS})
for _, member in ipairs(stale) do
  redis.call('ZADD', store, now, member)
  redis.call('ZREM', prepare, member)
end

local dropped = redis.call('ZRANGEBYSCORE', store, '-inf', '(' .. late, 'LIMIT', 0, {BATCH_ROWS})
local priorities = {{}}
if #dropped > 0 then
  for _, member in ipairs(dropped) do priorities[member:match('^%d+:%d+:(-?%d%d?%d?%d?%d?)$') or '0'] = true end
  redis.call('ZREMRANGEBYRANK', store, 0, #dropped - 1)
end
local levels = {{}}
for priority in pairs(priorities) do levels[#levels + 1] = priority end

-- All that is taken now gets a ticket of its own as its score. The mover deletes it by this score when it is handed on.
while redis.call('ZCOUNT', prepare, back, back) > 0 do back = back + 1 end
local due = redis.call('ZRANGEBYSCORE', store, '-inf', soon, 'WITHSCORES', 'LIMIT', 0, most)
if #due > 0 then
  local moved = {{}}
  for i = 1, #due, 2 do
    moved[i], moved[i + 1] = back, due[i]
    if not due[i]:find('^%S+$') then due[i] = '?' end  -- a stranger's, and no single word
  end
  redis.call('ZADD', prepare, unpack(moved))
  redis.call('ZREMRANGEBYRANK', store, 0, #due / 2 - 1)
end

local waiting = redis.call('ZRANGE', store, 0, 0, 'WITHSCORES')[2]
local prepared = redis.call('ZRANGE', prepare, 0, 0, 'WITHSCORES')[2] or 'inf'
local ticket = #due > 0 and string.format('%.17g', back) or '0'
return {{was_lost, #stale, #dropped, table.concat(levels, ' '), ticket, table.concat(due, ' '), waiting, prepared}}
"""
