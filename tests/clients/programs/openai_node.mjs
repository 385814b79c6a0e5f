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
const model = "demo";
const messages = [{ role: "user", content: "Count from 1 to 5." }];
const chat = (options = {}) =>
  client.chat.completions.create({ model, messages, temperature: 0, ...options });

const integer = { type: "integer" };
const parameters = { type: "object", properties: { a: integer, b: integer }, required: ["a", "b"] };
const tool = { type: "function", function: { name: "add", parameters } };

function check(isRight, shown) {
  if (!isRight) throw new Error(`wrong: ${JSON.stringify(shown)}`);
}
const says = (text) => check(text.trim() === "1, 2, 3, 4, 5", text);

const supported = {
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
  completion: async () => {
    const prompt = "1, 2, 3,";
    const answer = await client.completions.create({ model, prompt, temperature: 0, max_tokens: 5 });
    check(answer.choices[0].text.startsWith(" 4"), answer);
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
  models: async () => {
    const { data } = await client.models.list();
    check(data.length === 1 && data[0].id === model, data);
  },
  errors: async () => {
    const error = await chat({ model: "dem" }).catch((reason) => reason);
    check(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", error);
  },
};
const unsupported = {
  "Responses API": () => client.responses.create({ model, input: "Hello" }),
  embeddings: () => client.embeddings.create({ model, input: "Hello" }),
};

let failures = 0;
function tell(name, works, error) {
  failures += error ? 1 : 0;
  console.log(JSON.stringify({ version, name, works, error }));
}
for (const [name, exercise] of Object.entries(supported)) {
  const error = await exercise().then(() => "", (reason) => String(reason).slice(-600));
  tell(name, true, error);
}
for (const [name, exercise] of Object.entries(unsupported)) {
  const text = await exercise().then(() => "was not refused", String);
  tell(name, false, /not supported|there is no \/v1\//.test(text) ? "" : text.slice(-600));
}
process.exit(failures ? 1 : 0);
