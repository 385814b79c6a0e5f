// The official client for JavaScript. Prints the lines that exercises.py prints.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const folder = process.env.CLIENTS_NODE;
const OpenAI = createRequire(`${folder}/package.json`)("openai");
const { version } = JSON.parse(readFileSync(`${folder}/node_modules/openai/package.json`));
const client = new OpenAI({
  baseURL: `${process.env.CLIENTS_URL}/v1`,
  apiKey: "no-key-is-asked-for",
  maxRetries: 0,
});
const model = process.env.CLIENTS_MODEL ?? "demo";
const reasons = model !== "demo";
const messages = [{ role: "user", content: "Count from 1 to 5." }];
const chat = (options = {}) =>
  client.chat.completions.create({ model, messages, temperature: 0, ...options });

const input = messages[0].content;
const ask = (options = {}) =>
  client.responses.create({ model, input, temperature: 0, ...options });

const integer = { type: "integer" };
const parameters = { type: "object", properties: { a: integer, b: integer }, required: ["a", "b"] };
const tool = { type: "function", function: { name: "add", parameters } };

function check(isRight, shown) {
  if (!isRight) throw new Error(`wrong: ${JSON.stringify(shown)}`);
}
const HOUR_S = 3600;
const expires_after = { anchor: "created_at", seconds: HOUR_S };
const url = "/v1/chat/completions";
const MANY = 500; // lines of a batch that does not end before it is cancelled

async function upload(content, options = {}) {
  const file = await OpenAI.toFile(Buffer.from(content), "in.jsonl");
  return client.files.create({ file, purpose: "batch", ...options });
}
const line = (number, fields = {}) => {
  const body = { model, messages, temperature: 0, ...fields };
  return { custom_id: `id-${number}`, method: "POST", url, body };
};
const lines = (count) => [...Array(count).keys()].map((number) => line(number));
async function start(asked, options = {}) {
  const file = await upload(asked.map((each) => JSON.stringify(each) + "\n").join(""));
  const terms = { endpoint: url, completion_window: "24h", ...options };
  return client.batches.create({ input_file_id: file.id, ...terms });
}
// The batch, once it has this state or has ended.
async function reached(batch, status = "") {
  while (![status, "completed", "failed", "expired", "cancelled"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
}
async function results(id) {
  const text = id ? await (await client.files.content(id)).text() : "";
  return text.split("\n").filter(Boolean).map((each) => JSON.parse(each));
}
async function all(pages) {
  const found = [];
  for await (const each of pages) found.push(each);
  return found;
}
const idsOf = (found) => found.map((each) => each.custom_id);
const is = (found, wanted) => check(JSON.stringify(found) === JSON.stringify(wanted), found);
const says = (text) => check(text.trim() === "1, 2, 3, 4, 5", text);

async function isUnknown(call) {
  const error = await call.then(() => null, (reason) => reason);
  check(error instanceof OpenAI.NotFoundError, error);
}

const onlyOnDemo = {
  "cached tokens": async () => {
    const content = messages[0].content.repeat(10);
    const asked = { messages: [{ role: "user", content }], max_tokens: 1 };
    await chat(asked);
    const { usage } = await chat(asked);
    const found = usage.prompt_tokens_details.cached_tokens;
    check(0 < found && found < usage.prompt_tokens, usage);
    let last = null;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await chat({ ...asked, ...options })) last = chunk;
    is(last.usage, usage);
    await ask({ input: content });
    const used = (await ask({ input: content })).usage;
    check(used.input_tokens_details.cached_tokens > 0, used);
  },
  completion: async () => {
    const prompt = "1, 2, 3,";
    const answer = await client.completions.create({ model, prompt, temperature: 0, max_tokens: 5 });
    check(answer.choices[0].text.startsWith(" 4"), answer);
  },
  embeddings: async () => {
    const input = ["Hello", "Good-bye"];
    const { data } = await client.embeddings.create({ model: "embedder", input });
    check(data.length === 2 && data[0].embedding.length === data[1].embedding.length, data);
  },
  "files with pages and expiry": async () => {
    const stored = [];
    for (const content of ["0\n", "1\n", "2\n"]) stored.push(await upload(content, { expires_after }));
    check(stored[0].expires_at === stored[0].created_at + HOUR_S, stored[0]);
    is(await client.files.retrieve(stored[0].id), stored[0]);
    check((await client.files.waitForProcessing(stored[0].id)).status === "processed", stored[0]);
    const ids = stored.map((file) => file.id);
    for (const [order, wanted] of [["asc", ids], ["desc", ids.toReversed()]]) {
      const listed = await all(client.files.list({ limit: 1, order, purpose: "batch" }));
      is(listed.map((file) => file.id).filter((id) => ids.includes(id)), wanted);
    }
    for (const [number, id] of ids.entries()) {
      is(await (await client.files.content(id)).text(), `${number}\n`);
      check((await client.files.delete(id)).deleted, id);
      for (const ask of ["retrieve", "content", "delete"]) await isUnknown(client.files[ask](id));
    }
  },
  "batch with output and error file": async () => {
    const asked = [...lines(3), line(3, { temperature: 9 })];
    const started = await start(asked, { metadata: { run: "1" }, output_expires_after: expires_after });
    check(started.expires_at === started.created_at + 24 * HOUR_S, started);
    const ended = await reached(started);
    is([ended.status, ended.metadata], ["completed", { run: "1" }]);
    is(ended.request_counts, { total: 4, completed: 3, failed: 1 });
    const output = await results(ended.output_file_id);
    is(idsOf(output), ["id-0", "id-1", "id-2"]);
    for (const each of output) says(each.response.body.choices[0].message.content);
    const [error] = await results(ended.error_file_id);
    is([error.custom_id, error.response.status_code], ["id-3", 400]);
    const file = await client.files.retrieve(ended.output_file_id);
    is([file.purpose, file.expires_at], ["batch_output", file.created_at + HOUR_S]);
    const other = await reached(await start(asked));
    const listed = await all(client.batches.list({ limit: 1 }));
    is(listed.slice(0, 2).map((batch) => batch.id), [other.id, ended.id]);
  },
  "batch of a bad file": async () => {
    const bad = [line(0), line(0), line(1, { model: "other" }), line(2, { stream: true })];
    const failed = await reached(await start(bad));
    is(failed.status, "failed");
    is(failed.errors.data.map(({ line, code, param }) => [line, code, param]), [
      [2, "duplicate_custom_id", "custom_id"],
      [3, "mismatched_model", "body.model"],
      [4, "unsupported_parameter", "body.stream"],
    ]);
  },
  "cancelled batch": async () => {
    const running = await reached(await start(lines(MANY)), "in_progress");
    is((await client.batches.cancel(running.id)).status, "cancelling");
    const ended = await reached(running);
    is([ended.status, ended.request_counts.total], ["cancelled", MANY]);
    const errors = await results(ended.error_file_id);
    check(errors.every(({ error }) => error.code === "batch_cancelled"), errors[0]);
    const found = [...(await results(ended.output_file_id)), ...errors];
    is(idsOf(found).toSorted(), idsOf(lines(MANY)).toSorted());
  },
  "uploads in parts": async () => {
    const texts = ["0123456789".repeat(500), "abc"];
    const terms = { filename: "in.jsonl", mime_type: "text/plain", purpose: "batch" };
    const { id } = await client.uploads.create({ ...terms, bytes: texts.join("").length });
    const part_ids = [];
    for (const text of texts) part_ids.push((await client.uploads.parts.create(id, { data: new File([text], "part") })).id);
    const done = await client.uploads.complete(id, { part_ids });
    is(done.status, "completed");
    is(await (await client.files.content(done.file.id)).text(), texts.join(""));
    await client.files.delete(done.file.id);
  },
};
const onlyWithReasoning = {
  "reasoning apart, with its tokens": async () => {
    const { choices, usage } = await chat();
    says(choices[0].message.content);
    check(choices[0].message.reasoning_content, choices[0]);
    const { reasoning_tokens } = usage.completion_tokens_details;
    check(reasoning_tokens > 0 && reasoning_tokens < usage.completion_tokens, usage);
  },
  "response with its reasoning": async () => {
    const { output, output_text } = await ask();
    is(output.map((item) => item.type), ["reasoning", "message"]);
    says(output_text);
  },
};
const onEach = {
  chat: async () => says((await chat()).choices[0].message.content),
  "chat stream with usage": async () => {
    let text = "";
    let usage = null;
    const stream = await chat({ stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    says(text);
    check(usage.completion_tokens > 0, usage);
  },
  "structured output": async () => {
    const value = { type: "integer", minimum: 0, maximum: 198 };
    const schema = {
      type: "object",
      properties: { value },
      required: ["value"],
      additionalProperties: false,
    };
    const response_format = { type: "json_schema", json_schema: { name: "sum", strict: true, schema } };
    const messages = [{ role: "user", content: "What is 27 + 58?" }];
    const answer = (await chat({ messages, response_format })).choices[0].message.content;
    check(JSON.parse(answer).value === 85, answer);
  },
  tools: async () => {
    const messages = [{ role: "user", content: "What is 1234 + 5678?" }];
    const asked = (await chat({ messages, tools: [tool] })).choices[0].message;
    const { a, b } = JSON.parse(asked.tool_calls[0].function.arguments);
    const result = { role: "tool", tool_call_id: asked.tool_calls[0].id, content: String(a + b) };
    const answer = await chat({ messages: [...messages, asked, result], tools: [tool] });
    check(answer.choices[0].message.content.trim() === "6912", answer);
  },
  response: async () => says((await ask()).output_text),
  "response stream": async () => {
    const stream = client.responses.stream({ model, input, temperature: 0 });
    let text = "";
    stream.on("response.output_text.delta", ({ delta }) => (text += delta));
    says((await stream.finalResponse()).output_text);
    says(text);
  },
  "response in the background, polled and resumed at each event": async () => {
    let asked = await ask({ background: true });
    while (["queued", "in_progress"].includes(asked.status)) {
      asked = await client.responses.retrieve(asked.id);
    }
    says(asked.output_text);
    const after = async (starting_after) => {
      const events = [];
      const options = { stream: true, starting_after };
      for await (const event of await client.responses.retrieve(asked.id, options)) {
        events.push(JSON.stringify(event));
      }
      return events;
    };
    const events = await after();
    for (const number of events.keys()) {
      const rest = await after(number);
      check(rest.join() === events.slice(number + 1).join(), rest);
    }
  },
  "background stream broken off and resumed": async () => {
    const first = [];
    for await (const event of await ask({ background: true, stream: true })) {
      first.push(event);
      if (first.length === 3) break;
    }
    const starting_after = first[2].sequence_number;
    const response_id = first[0].response.id;
    const stream = client.responses.stream({ response_id, starting_after });
    const events = await all(stream);
    is(events[0].sequence_number, starting_after + 1);
    says((await stream.finalResponse()).output_text);
  },
  "response with tools, in a chain": async () => {
    const tools = [{ type: "function", strict: false, ...tool.function }];
    const asked = await ask({ input: "What is 1234 + 5678?", tools });
    const call = asked.output.find((item) => item.type === "function_call");
    const { a, b } = JSON.parse(call.arguments);
    const output = String(a + b);
    const result = { type: "function_call_output", call_id: call.call_id, output };
    const answer = await ask({ input: [result], tools, previous_response_id: asked.id });
    check(answer.output_text.trim() === "6912", answer);
  },
  "response, parsed": async () => {
    const value = { type: "integer", minimum: 0, maximum: 198 };
    const schema = { type: "object", properties: { value }, required: ["value"], additionalProperties: false };
    const format = { type: "json_schema", name: "sum", strict: true, schema };
    const input = "What is 27 + 58?";
    const answer = await client.responses.parse({ model, input, temperature: 0, text: { format } });
    is(answer.output_parsed, { value: 85 });
  },
  "response cancelled, its items listed, deleted": async () => {
    const { id } = await ask({ background: true });
    await client.responses.cancel(id);
    is((await all(client.responses.inputItems.list(id)))[0].content[0].text, input);
    await client.responses.delete(id);
    await isUnknown(client.responses.retrieve(id));
  },
  models: async () => {
    const { data } = await client.models.list();
    check(data.some(({ id }) => id === model), data);
  },
  errors: async () => {
    const error = await chat({ model: "dem" }).catch((reason) => reason);
    check(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", error);
  },
};
const unsupported = {
  conversations: () => ask({ conversation: "conv_1" }),
};
const supported = { ...onEach, ...(reasons ? onlyWithReasoning : onlyOnDemo) };

let failures = 0;
function tell(name, works, error) {
  failures += error ? 1 : 0;
  console.log(JSON.stringify({ version, name, works, error }));
}
for (const [name, exercise] of Object.entries(supported)) {
  const error = await exercise().then(() => "", (reason) => String(reason).slice(-600));
  tell(name, true, error);
}
for (const [name, exercise] of Object.entries(reasons ? {} : unsupported)) {
  const text = await exercise().then(() => "was not refused", String);
  tell(name, false, /not supported|there is no \/v1\//.test(text) ? "" : text.slice(-600));
}
process.exit(failures ? 1 : 0);
