// One action on a BullMQ queue: node bullmq.mjs SOCKET ACTION CLIENTS JOBS; prints the seconds.
import { createRequire } from "node:module";
const { Queue, QueueEvents, Worker } = createRequire(process.cwd() + "/")("bullmq");

const [path, action, clients, jobs] = process.argv.slice(2);
const connection = { path, maxRetriesPerRequest: null };
const data = { text: "x".repeat(600) };
const queue = new Queue("bench", { connection });

async function shared(call) {
  let left = Number(jobs);
  const one = async () => { while (left-- > 0) await call(); };
  await Promise.all(Array.from({ length: Number(clients) }, one));
}

const actions = {
  async enqueue() {
    await shared(() => queue.add("job", data));
  },
  async finish() {
    let left = Number(jobs);
    await new Promise((resolve, reject) => {
      const worker = new Worker("bench", async () => "done", { connection, concurrency: Number(clients) });
      worker.on("completed", () => { if (--left === 0) resolve(worker.close()); });
      worker.on("error", reject);
    });
  },
  async append() {
    const job = await queue.add("job", data);
    const events = new QueueEvents("bench", { connection });
    await events.waitUntilReady();
    let number = 0;
    const all = new Promise((resolve) => {
      events.on("progress", ({ data }) => { if (data.number === number) resolve(); });
    });
    await shared(() => job.updateProgress({ number: ++number, text: "token " }));
    await all;
    await events.close();
  },
};

await queue.waitUntilReady();
await queue.getJobCounts("waiting");
const start = performance.now();
await actions[action]();
console.log((performance.now() - start) / 1000);
await queue.close();
process.exit(0);
