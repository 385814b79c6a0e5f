// The backend of a chat whose answers survive reloads, closed tabs, sleep and dead gateways.
//
//   npm install && BATCHWAY_URL=http://127.0.0.1:8000 npm start
//
// An answer is made once, and every request for it reads it from its first token on: the same call
// with the same Idempotency-Key finds the job of the first one, at any gateway. A caller that leaves
// cancels nothing.

import { createServer } from "node:http";
import { json } from "node:stream/consumers";
import { pipeline } from "node:stream/promises";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { convertToModelMessages, streamText } from "ai";
import { build } from "esbuild";

const { BATCHWAY_URL, BATCHWAY_API_KEY, MODEL = "demo", PORT = "3000" } = process.env;
const batchway = createOpenAICompatible({
  name: "batchway",
  baseURL: `${BATCHWAY_URL}/v1`,
  apiKey: BATCHWAY_API_KEY,
});
const entryPoints = [new URL("page.jsx", import.meta.url).pathname];
const bundled = await build({ entryPoints, bundle: true, format: "esm", jsx: "automatic", write: false });
const script = bundled.outputFiles[0].text;
const html = '<!doctype html><meta charset="utf-8"><main></main><script type="module" src="/page.js"></script>';
const chats = new Map(); // the messages of each chat; yours would be in a database, by user

async function answer(id, response) {
  const known = chats.get(id);
  const messages = known.slice(0, known.findLastIndex(({ role }) => role === "user") + 1);
  const question = messages.at(-1);
  const gone = new AbortController();
  response.on("close", () => gone.abort());
  const result = streamText({
    model: batchway(MODEL),
    messages: await convertToModelMessages(messages),
    headers: { "Idempotency-Key": `${id}-${question.id}` },
    abortSignal: gone.signal,
    onError: () => {}, // the page is told
  });
  const { body, headers } = result.toUIMessageStreamResponse({
    originalMessages: messages,
    generateMessageId: () => `answer-${question.id}`,
    onError: (error) => (isPassing(error) ? "broken off" : `refused: ${error.message}`),
    onFinish: ({ messages, outcome }) => {
      const isNews = chats.get(id) === known; // neither another tab's, nor before a new question
      if (isNews && outcome.status === "completed") chats.set(id, messages);
    },
  });
  await pipeline(body, response.setHeaders(headers)); // breaks off if the answer does
}

// Whether the answer goes on elsewhere: the connection broke, or the gateway stops.
function isPassing(error) {
  return error instanceof Error ? error.isRetryable !== false : error.code === "draining";
}

async function serve(request, response) {
  const [, api, , id, stream] = request.url.split("/"); // /api/chat/ID/stream
  if (request.method === "POST") {
    const asked = await json(request);
    chats.set(asked.id, asked.messages);
    await answer(asked.id, response);
  } else if (api !== "api") {
    const isScript = api === "page.js";
    response.setHeader("content-type", isScript ? "text/javascript" : "text/html");
    response.end(isScript ? script : html);
  } else if (!stream) {
    response.end(JSON.stringify(chats.get(id) ?? []));
  } else if (chats.has(id)) {
    await answer(id, response);
  } else {
    response.writeHead(204).end();
  }
}

const server = createServer((request, response) => {
  serve(request, response).catch(() => response.destroy());
});
server.listen(Number(PORT), "127.0.0.1", () => {
  console.log(`http://127.0.0.1:${server.address().port}/any-name`);
});
