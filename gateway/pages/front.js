// The front door: the models, and a chat whose answers go on after a broken connection.
import { $, call, enter, events, h, json, number, seconds, sleep } from "/assets/common.js";

const CHAT = "/v1/chat/completions";
const RETRY_MS = 500;
const messages = [];
const cards = new Map();
let running = null; // the job that answers
let shownModels = "";

function showModels(state) {
  const announced = (state?.models ?? []).filter((model) => !cards.has(model.name));
  const rows = announced.map((model) => [model.name, stateOf(model, {}), number(model.workers), "", ""]);
  rows.push(...[...cards.values()].map((card) => {
    const known = (state?.models ?? []).find((model) => model.name === card.id);
    const text = card.flow ? `flow (${card.flow})` : stateOf(known, card);
    return [card.id, text, card.flow ? "" : number(known?.workers ?? 0), card.endpoints.join(" "), number(card.max_model_len)];
  }));
  if (JSON.stringify(rows) === shownModels) return;
  shownModels = JSON.stringify(rows);
  $("models").replaceChildren(...rows.map((row) => h("tr", {}, ...row.map((text, i) =>
    h("td", { class: i === 2 || i === 4 ? "number" : "" }, text)))));
  $("no-models").hidden = rows.length > 0;
  const names = [...cards.values()].filter((card) => card.endpoints.includes(CHAT)).map((card) => card.id);
  $("chosen").hidden = names.length === 0;
  const before = $("model").value;
  $("model").replaceChildren(...names.map((name) => h("option", { selected: name === before }, name)));
  showSnippets();
}

function stateOf(known, card) {
  if (card.failed) return `failed: ${card.failed.reason}`;
  if (!known) return "";
  if (known.state !== "starting") return known.state;
  return `starting since ${new Date(1000 * known.since_s).toLocaleTimeString()}, expected in ${seconds(known.ready_in_s)}`;
}

async function loadCards() {
  const found = (await json("/v1/models")).data;
  cards.clear();
  for (const card of found) cards.set(card.id, card);
}

async function watch() {
  for (;;) {
    try {
      await loadCards();
      for await (const { event, data } of events(await call("/console/feed"))) {
        if (event !== "state") continue;
        const state = JSON.parse(data);
        if ((state.models ?? []).some((model) => model.workers && !cards.has(model.name))) await loadCards();
        showModels(state);
      }
    } catch (error) {
      if (error.status === 401) return;
    }
    await sleep(RETRY_MS);
  }
}

function parameters() {
  const body = { model: $("model").value, temperature: Number($("temperature").value), max_tokens: Number($("max-tokens").value) || 256 };
  if ($("seed").value) body.seed = Number($("seed").value);
  if ($("stop").value) body.stop = $("stop").value;
  if (!$("thinking-label").hidden) body.chat_template_kwargs = { enable_thinking: $("thinking").checked };
  return body;
}

function showSnippets() {
  const card = cards.get($("model").value);
  $("thinking-label").hidden = !card?.reasoning_parser;
  const body = { ...parameters(), messages: [{ role: "user", content: "Count from 1 to 10." }] };
  const shell = JSON.stringify(body).replaceAll("'", "'\\''");
  $("curl").textContent = `curl ${location.origin}${CHAT} \\\n  -H 'content-type: application/json' -H "authorization: Bearer $BATCHWAY_API_KEY" \\\n  -d '${shell}'`;
  $("python").textContent = `from openai import OpenAI\nclient = OpenAI(base_url="${location.origin}/v1", api_key="…")\nanswer = client.chat.completions.create(model=${JSON.stringify(body.model)}, messages=[{"role": "user", "content": "Count from 1 to 10."}])\nprint(answer.choices[0].message.content)`;
}

async function send() {
  const said = $("said").value;
  if (!said.trim() || running) return;
  $("said").value = "";
  messages.push({ role: "user", content: said });
  $("talk").append(h("p", { class: "said user" }, said));
  busy(true, "Waiting for the first token");
  try {
    const body = { ...parameters(), messages };
    const job = await json("/v1/jobs", { method: "POST", body: { endpoint: CHAT, lane: "interactive", body } });
    running = job.id;
    const answer = await follow(job.id);
    if (answer) messages.push({ role: "assistant", content: answer });
  } catch (error) {
    $("status").textContent = error.retry_s ? `${error.message} Try again in ${seconds(error.retry_s)}.` : error.message;
    busy(false);
  }
  running = null;
}

function busy(is, text) {
  $("send").disabled = is;
  $("halt").disabled = !is;
  if (text !== undefined) $("status").textContent = text;
}

// Reads the job's events to their end. After a broken connection it goes on behind the last event.
async function follow(id) {
  const thought = h("p", { class: "said thought", hidden: true });
  const answer = h("p", { class: "said" });
  $("talk").append(thought, answer);
  let last = "", breaks = 0, begun = false;
  for (;;) {
    try {
      const headers = last ? { "last-event-id": last } : {};
      const stream = await call(`/v1/jobs/${id}/events`, { headers });
      if (breaks) $("status").textContent = "Resumed: the connection broke, and the answer goes on where it was.";
      for await (const { event, id: at, data } of events(stream)) {
        if (data === "[DONE]") return answer.textContent;
        if (event === "stream_reset") { answer.textContent = thought.textContent = last = ""; }
        else if (event === "queued") { if (!begun) $("status").textContent = queued(JSON.parse(data)); }
        else if (["succeeded", "failed", "cancelled", "expired"].includes(event)) finish(event, JSON.parse(data), breaks);
        else if (!event) {
          if (!begun) { begun = true; $("status").textContent = "Answering"; }
          const delta = JSON.parse(data).choices?.[0]?.delta ?? {};
          const text = delta.reasoning_content ?? delta.reasoning ?? "";
          if (text) { thought.hidden = false; thought.textContent += text; }
          answer.textContent += delta.content ?? "";
          if (at) last = at;
        }
      }
    } catch (error) {
      if (error.status && error.status < 500) throw error;
    }
    breaks += 1;
    $("status").textContent = "The connection broke; trying to resume";
    await sleep(RETRY_MS);
  }
}

function queued(job) {
  if (job.waiting_for === "worker") return `Waiting for a worker, expected in ${seconds(job.expected_start_s)}`;
  return job.eta_s === null ? "Waiting" : `Waiting, ${number(job.position)} jobs ahead, about ${seconds(job.eta_s)}`;
}

function finish(event, job, breaks) {
  const tokens = job.usage ? `${number(job.usage.completion_tokens)} tokens` : "";
  const resumed = breaks ? `; resumed after ${breaks} broken ${breaks === 1 ? "connection" : "connections"}, no token lost` : "";
  busy(false, event === "succeeded" ? `Done: ${tokens}${resumed}` : `${event}: ${job.error?.message ?? ""}${resumed}`);
}

$("send").addEventListener("click", send);
$("said").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
});
$("halt").addEventListener("click", () => running && call(`/v1/jobs/${running}/cancel`, { method: "POST", body: {} }).catch(() => null));
$("clear").addEventListener("click", () => { messages.length = 0; $("talk").replaceChildren(); $("status").textContent = ""; });
for (const name of ["model", "temperature", "seed", "stop", "max-tokens", "thinking"]) $(name).addEventListener("input", showSnippets);

if (await enter()) watch();
