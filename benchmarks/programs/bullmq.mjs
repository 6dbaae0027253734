// BullMQ: the equivalent of program.py in JavaScript. `node bullmq.mjs produce|work`
import fs from "node:fs";
import { createRequire } from "node:module";
import readline from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

// The packages are installed in another folder.
const require = createRequire(process.env.BENCH_NODE_FOLDER + "/");
const { Queue, Worker } = require("bullmq");
const Redis = require("ioredis");

const QUEUE = "bench";
const CHUNK = 1000;
// The documentation recommends a concurrency of 100 to 300 and several processes for short jobs.
const CONCURRENCY = process.env.BENCH_ONE_AT_A_TIME ? 1 : 100;

const connect = () => new Redis(process.env.BENCH_REDIS_URL, { maxRetriesPerRequest: null });
const wall = () => (performance.timeOrigin + performance.now()) / 1000;
const cpuMs = () => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1000;
};
const compute = (ms) => {
  const ends = cpuMs() + ms;
  while (cpuMs() < ends);
};
const say = (line) => fs.writeSync(1, `\n${line}\n`);

function work() {
  const file = fs.openSync(process.env.BENCH_NOTES, "a");
  const takesMs = 1000 * (process.env.BENCH_TAKES_S ?? 0);
  const line = Buffer.alloc(24);
  const note = (due, began) => {
    line.writeDoubleLE(due, 0);
    line.writeDoubleLE(began, 8);
    line.writeDoubleLE(wall(), 16);
    fs.writeSync(file, line);
  };
  const run = async (job) => {
    const began = wall();
    if (takesMs) {
      note(-process.pid, began);
      await (process.env.BENCH_COMPUTES ? compute(takesMs) : sleep(takesMs));
    }
    note(job.data.due, began);
  };
  const worker = new Worker(QUEUE, run, { connection: connect(), concurrency: CONCURRENCY });
  process.on("SIGTERM", () => worker.close(true).then(() => process.exit(0)));
}

const queue = process.argv[2] === "produce" ? new Queue(QUEUE, { connection: connect() }) : null;
const job = (due) => ({
  name: "note",
  data: { due },
  opts: { delay: Math.max(Math.ceil((due - wall()) * 1000), 0), removeOnComplete: true },
});
const schedule = (due) => {
  const { name, data, opts } = job(due);
  return queue.add(name, data, opts);
};
const scheduleMany = (dues) => queue.addBulk(dues.map(job));

const verbs = {
  async schedule({ count, first, last, limit_s }) {
    return inSteps(count, first, last, limit_s, 1, ([due]) => schedule(due));
  },
  async schedule_many({ count, first, last, limit_s }) {
    return inSteps(count, first, last, limit_s, CHUNK, scheduleMany);
  },
  async steady({ rate, batch, delays, limit_s }) {
    const began = wall();
    let made = 0;
    for (; made < delays.length && wall() - began < limit_s; made += batch) {
      await sleep(Math.max(began + made / rate - wall(), 0) * 1000);
      const now = wall();
      const dues = delays.slice(made, made + batch).map((delay) => now + delay);
      await (batch === 1 ? schedule(dues[0]) : scheduleMany(dues));
    }
    return { tasks: made, took_s: wall() - began };
  },
  async ended_at() {
    return { at: null };
  },
};

async function inSteps(count, first, last, limitS, size, add) {
  const began = wall();
  const step = (last - first) / Math.max(count - 1, 1);
  let made = 0;
  while (made < count && wall() - began <= limitS) {
    const dues = [];
    for (let n = made; n < Math.min(made + size, count); n++) dues.push(first + n * step);
    await add(dues);
    made += dues.length;
  }
  return { tasks: made, took_s: wall() - began };
}

async function produce() {
  await queue.waitUntilReady();
  say("ready");
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { number, verb, ...order } = JSON.parse(line);
    say(`answer ${number} ${JSON.stringify(await verbs[verb](order))}`);
  }
  process.exit(0);
}

if (process.argv[2] === "produce") await produce();
else work();
