"""The scripts of the `redis` timer. Redis runs each script as one step.

A slot has two sorted sets. In `store` entries wait, with the due time in milliseconds as score. In
`prepare` are the entries that a Redis poller took and has not handed on yet. Their score is the
time at which they return to `store` if the poller never deletes them. An entry is in at most one of
the two sets. The last member of `store` is always ".", which distinguishes an empty slot from one
that Redis lost.
"""

from __future__ import annotations

#: The members in one call. Lua's stack has room for a few thousand values.
MAX_ENTRIES = 1000

#: Adds entries to a slot; repeating the call has no effect.
#:
#: KEYS: store, prepare. ARGV: channel, the slot's name, then score and member of each entry, the
#: earliest first. Pollers are notified only if the first entry of the slot changed, or Redis had
#: lost the slot.
ARM = """
local is_lost = not redis.call('ZSCORE', KEYS[1], '.')
local is_earliest = redis.call('ZCOUNT', KEYS[1], '-inf', ARGV[3]) == 0
redis.call('ZADD', KEYS[1], unpack(ARGV, 3))
if redis.call('EXISTS', KEYS[2]) == 1 then
  for i = 4, #ARGV, 2 do redis.call('ZREM', KEYS[2], ARGV[i]) end
end
if is_lost or is_earliest then
  redis.call('PUBLISH', ARGV[1], ARGV[2] .. ' ' .. (is_lost and 0 or ARGV[3]))
end
"""

#: Moves due entries from `store` to `prepare`, and returns them.
#:
#: KEYS: store, prepare. ARGV: now, the time before which an entry is too late, the time up to which
#: entries are taken, the time at which entries that are not handed on return, the number of
#: entries. The answer: whether Redis had lost the slot; the number of entries that returned; the
#: number of entries that were too late, and their priorities; the ticket of this call; due times
#: and members; the next times in both sets.
TAKE = f"""
local store, prepare, now, late, soon = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local back, most = tonumber(ARGV[4]), ARGV[5]
-- This write takes no memory. After it, a Redis that is full allows the other writes, so that
-- entries can leave.
redis.call('ZREM', prepare, '.')
local was_lost = redis.call('ZADD', store, 'NX', '+inf', '.')

local stale = redis.call('ZRANGEBYSCORE', prepare, '-inf', now, 'LIMIT', 0, {MAX_ENTRIES})
for _, member in ipairs(stale) do
  redis.call('ZADD', store, now, member)
  redis.call('ZREM', prepare, member)
end

local dropped = redis.call('ZRANGEBYSCORE', store, '-inf', '(' .. late, 'LIMIT', 0, {MAX_ENTRIES})
local priorities = {{}}
if #dropped > 0 then
  for _, member in ipairs(dropped) do
    priorities[member:match('^%d+:%d+:(-?%d%d?%d?%d?%d?)$') or '0'] = true
  end
  redis.call('ZREMRANGEBYRANK', store, 0, #dropped - 1)
end
local levels = {{}}
for priority in pairs(priorities) do levels[#levels + 1] = priority end

-- The entries of this call have the same score, the ticket, which no other call has. The poller
-- deletes them by this score when it has handed them on.
while redis.call('ZCOUNT', prepare, back, back) > 0 do back = back + 1 end
local due = redis.call('ZRANGEBYSCORE', store, '-inf', soon, 'WITHSCORES', 'LIMIT', 0, most)
if #due > 0 then
  local moved = {{}}
  for i = 1, #due, 2 do
    moved[i], moved[i + 1] = back, due[i]
    if not due[i]:find('^%S+$') then due[i] = '?' end  -- another program's member with a space
  end
  redis.call('ZADD', prepare, unpack(moved))
  redis.call('ZREMRANGEBYRANK', store, 0, #due / 2 - 1)
end

local waiting = redis.call('ZRANGE', store, 0, 0, 'WITHSCORES')[2]
local prepared = redis.call('ZRANGE', prepare, 0, 0, 'WITHSCORES')[2] or 'inf'
local ticket = #due > 0 and string.format('%.17g', back) or '0'
return {{
  was_lost, #stale, #dropped, table.concat(levels, ' '), ticket, table.concat(due, ' '), waiting,
  prepared
}}
"""
