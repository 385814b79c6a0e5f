// The live console: what the feed says, and the API's routes for jobs, pauses, flows and batches.
import { $, call, clock, enter, events, h, json, number, seconds, sleep, who } from "/assets/common.js";

const VIEWS = ["overview", "batch", "jobs", "flows"];
const RETRY_MS = 1000;
const PAST_S = 900;
const SHORTEST_S = 120;
const SHOWN_S = 60; // of the batch
const REFRESH_S = 2; // of lists
const MAX_HELD = 1000; // jobs that the feed names of a model
let state = null;
let pauses = [];
const past = new Map(); // model -> points

// --- what all views share ---------------------------------------------------------------------

const view = () => VIEWS.find((name) => !$(name).hidden) ?? "overview";
const model = () => $("model").value;
const cell = (value, kind = "number") => h("td", { class: kind }, value);
const rows = (id, found) => $(id).replaceChildren(...found);
const short = (id) => `${id.slice(0, 6)}…${id.slice(-8)}`;
const tone = (status) => ({ succeeded: "good", failed: "bad" })[status] ?? "";
const money = (cost) => cost.toLocaleString("en", cost < 1 ? { maximumSignificantDigits: 2 } : { maximumFractionDigits: 2 });
// A job's times: [name, from, to].
const phases = ({ queued_at, started_at, first_token_at, finished_at }, now, end = finished_at ?? now) =>
  [["queued", queued_at, started_at ?? end], ["prefill", started_at, first_token_at ?? end], ["decode", first_token_at, end]].filter(([, from]) => from);
const pair = (times, i) => (times ? seconds(times[i]) : "–");

function show(name) {
  for (const each of VIEWS) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", each === name);
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  if (location.hash.slice(1).split("/")[0] !== name) history.replaceState(null, "", `#${name}`);
  draw();
  refresh();
}

function tell(text) {
  $("told").textContent = text;
  $("told").hidden = !text;
}

async function attempt(work) {
  tell("");
  try {
    return await work();
  } catch (error) {
    tell(error.message);
    return null;
  }
}

function confirmed(text) {
  $("confirm-text").textContent = text;
  $("confirm").showModal();
  return new Promise((resolve) => {
    const end = (is) => () => { $("confirm").close(); resolve(is); };
    $("confirm-yes").onclick = end(true);
    $("confirm-no").onclick = end(false);
    $("confirm").oncancel = () => resolve(false);
  });
}

const act = (text, path, options = {}) => async () => {
  if (!(await confirmed(text))) return;
  await attempt(() => call(path, { method: "POST", body: {}, ...options }));
  await refresh();
};

const button = (text, onclick, label) => h("button", { class: "small", onclick, "aria-label": label }, text);

// --- overview ---------------------------------------------------------------------------------

const CHARTS = [
  ["Tokens per second", [["in", (p) => p.tokens_in], ["out", (p) => p.tokens_out]], (v) => number(v)],
  ["First token", spread("ttft"), seconds],
  ["Between tokens", spread("itl"), seconds],
  ["Whole answer", spread("e2e"), seconds],
  ["Jobs", [["running", (p) => p.running], ["waiting", (p) => p.waiting]], (v) => number(v)],
  ["Sequences in a step, and padding (%)", [["sequences", (p) => p.batch], ["padding", (p) => (p.padding === null ? null : 100 * p.padding)]], (v) => number(v, 1)],
  ["GPUs busy (%)", [["mean", (p) => (p.gpu === null ? null : 100 * p.gpu)]], (v) => number(v)],
  ["Computed again: tokens and preemptions per second", [["tokens", (p) => p.recomputed], ["preemptions", (p) => p.preemptions]], (v) => number(v, 1)],
];
const charts = [];

function spread(name) {
  return ["p50", "p90", "p99"].map((label, i) => [label, (point) => point[name][i]]);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const TIME_STEPS = [...[0.001, 0.01, 0.1, 1].flatMap((s) => [s, 2 * s, 5 * s]), 10, 20, 30, 60, 120, 300, 600, 1800, 3600]; // s
const LINES = ["--accent", "--prefill", "--bad"];

function axes(format) {
  const plain = { stroke: colour("--weak"), grid: { stroke: colour("--line"), width: 0.5 }, ticks: { stroke: colour("--line") } };
  const steps = format === seconds ? { incrs: TIME_STEPS } : {};
  return [{ ...plain, space: 80 }, { ...plain, ...steps, size: 70, values: (_, ticks) => ticks.map((tick) => format(tick)) }];
}

function ofTime(format) {
  const [time, values] = axes(format);
  return [{ ...time, values: (_, ticks) => ticks.map((tick) => new Date(1000 * tick).toLocaleTimeString("en-GB", { timeStyle: "short" })) }, values];
}

// From the first known point, two minutes at least.
function shownTime(times) {
  const now = state?.at ?? 0;
  return [Math.min(now - SHORTEST_S, Math.max(now - PAST_S, times[0] ?? 0)), now];
}

function chart(parent, title, series, format) {
  const box = h("div", { class: "chart", role: "img" }, h("h3", {}, title));
  parent.append(box);
  const shown = series.map(([label], i) => ({
    label, stroke: colour(LINES[i]), width: 2, spanGaps: false, value: (_, value) => (value === null ? "–" : format(value)),
  }));
  const plot = new uPlot({
    width: Math.max(200, box.clientWidth - 16), height: 180, legend: { live: false }, cursor: { drag: { x: false, y: false } },
    axes: ofTime(format), scales: { x: { range: (plot) => shownTime(plot.data[0]) } }, series: [{}, ...shown],
  }, [[], ...series.map(() => [])], box);
  new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth - 16), height: 180 })).observe(box);
  return { plot, box, title, series, format };
}

function drawCharts() {
  if (!who.sees_fleet) return;
  if (!charts.length) for (const [title, series, format] of CHARTS) charts.push(chart($("charts"), title, series, format));
  const points = past.get(model()) ?? [];
  $("charts").dataset.points = points.length;
  for (const each of charts) {
    const data = [points.map((point) => point.at), ...each.series.map(([, of]) => points.map((point) => of(point) ?? null))];
    each.box.hidden = each.title.startsWith("GPU") && data[1].every((value) => value === null); // a CPU has no figure
    each.plot.setData(data);
    const last = each.series.map(([label], i) => `${label} ${data[i + 1].at(-1) == null ? "unknown" : each.format(data[i + 1].at(-1))}`);
    each.box.setAttribute("aria-label", `${each.title}: ${last.join(", ")}`);
  }
}

function pausedBy(row) {
  return pauses.find((each) => (each.lane ?? row.lane) === row.lane && (each.model ?? row.model) === row.model
    && (each.tenant ?? row.tenant ?? null) === (row.tenant ?? null));
}

function drawOverview() {
  const found = state.models.find((each) => each.name === model());
  const point = state.newest?.[model()];
  const parts = found ? [`${found.name}: ${found.state}${found.workers ? `, ${found.workers} ${found.workers === 1 ? "worker" : "workers"}` : ""}`] : [];
  if (found?.state === "starting") parts.push(`since ${clock(found.since_s)}, expected in ${seconds(found.ready_in_s)}`);
  if (found?.wanted !== null && found?.wanted !== undefined) parts.push(`${found.wanted} wanted`);
  if (found?.reason) parts.push(found.reason);
  if (point) parts.push(`${number(point.tokens_out)} output tokens/s`, `${number(point.jobs, 1)} jobs/s`);
  const price = state.prices?.[model()];
  if (price) parts.push(`${money(price)} for a million output tokens, at ${state.worker_price} for a worker's hour`);
  const callbacks = Object.entries(state.deliveries ?? {}).map(([outcome, num]) => `${number(num)} attempts: ${outcome}`);
  if (state.callbacks) callbacks.unshift(`${number(state.callbacks[0])} waiting`, `${number(state.callbacks[1])} dead`);
  if (callbacks.length) parts.push(`callbacks: ${callbacks.join(", ")}`);
  $("summary").textContent = parts.join("; ");
  drawCharts();
  rows("lanes", (state.lanes ?? []).filter((lane) => lane.model === model()).map(laneRow));
  const refused = Object.entries(state.refusals ?? {}).map(([reason, num]) => `${num} ${reason}`);
  $("refusals").textContent = refused.length ? `Refused in the last ten seconds: ${refused.join(", ")}` : "";
  rows("tenants", tenants().map(tenantRow));
  const starts = found && found.ready_in_s !== null && who.sees_fleet ? [startRow(found)] : [];
  rows("workers", [...(state.workers ?? []).filter((each) => each.model === model()).map(workerRow), ...starts]);
}

function laneRow(lane) {
  const has = state.models.some((each) => each.name === lane.model && each.workers > 0);
  const pause = pausedBy({ ...lane, tenant: null });
  const scope = `lane ${lane.lane} of ${lane.model}`;
  const body = { lane: lane.lane, model: lane.model };
  const action = pause
    ? button("Resume", act(`Resume the ${scope}? Its waiting jobs run in their order.`, "/v1/lanes/resume", { body: named(pause) }), `Resume ${scope}`)
    : button("Pause", act(`Pause the ${scope}? New calls are refused, ${lane.num_waiting} waiting jobs stay in order, ${lane.num_running} running ones go on.`, "/v1/lanes/pause", { body }), `Pause ${scope}`);
  return h("tr", {}, cell(lane.lane, ""), h("td", { class: pause ? "warn" : "" }, pause ? "paused" : "open"),
    cell(number(lane.num_running)), cell(number(lane.num_waiting)), cell(has ? "0" : number(lane.num_waiting)),
    cell(lane.num_waiting ? seconds(lane.oldest_s) : "–"), cell(number(lane.queue_tokens)),
    cell(number(lane.jobs_per_s, 1)), cell(number(lane.tokens_per_s)), cell(pair(lane.wait_s, 0)), cell(pair(lane.wait_s, 1)),
    cell(pair(lane.ttft_s, 0)), cell(pair(lane.ttft_s, 1)), h("td", {}, who.is_admin ? action : null));
}

const named = ({ lane, tenant, model: of }) =>
  Object.fromEntries(Object.entries({ lane, tenant, model: of }).filter(([, value]) => value));

function tenants() {
  const found = new Map();
  const at = (row) => {
    const key = JSON.stringify([row.lane, row.tenant]);
    if (!found.has(key)) found.set(key, { model: model(), lane: row.lane, tenant: row.tenant, weight: null, running: 0, waiting: 0, tokens: 0 });
    return found.get(key);
  };
  for (const job of state.held ?? []) if (job.model === model()) at(job).running += 1;
  for (const row of state.waiting ?? []) {
    if (row.model !== model()) continue;
    Object.assign(at(row), { weight: row.weight, waiting: row.num_jobs, tokens: row.num_tokens });
  }
  return [...found.values()].sort((a, b) => a.lane.localeCompare(b.lane) || b.running - a.running || a.tenant.localeCompare(b.tenant));
}

function tenantRow(row, _, all) {
  const lane = all.filter((each) => each.lane === row.lane);
  const running = lane.reduce((sum, each) => sum + each.running, 0);
  const weights = lane.reduce((sum, each) => sum + (each.weight ?? 1), 0);
  const pause = pausedBy(row);
  const scope = `tenant ${row.tenant}`;
  const actions = who.is_admin || row.tenant === who.tenant ? [
    pause?.tenant ? button("Resume", act(`Resume the ${scope}?`, "/v1/lanes/resume", { body: named(pause) }), `Resume ${scope}`)
      : button("Pause", act(`Pause the ${scope} in all lanes? Its new calls are refused, its waiting jobs stay in order.`, "/v1/lanes/pause", { body: { tenant: row.tenant } }), `Pause ${scope}`),
    " ", button("Cancel jobs", () => cancelAll({ tenant: row.tenant, lane: row.lane }, `all jobs of the ${scope} in the lane ${row.lane}`), `Cancel all jobs of ${scope} in ${row.lane}`),
  ] : [];
  return h("tr", {}, cell(row.tenant, ""), cell(row.lane, ""), cell(row.weight === null ? "–" : number(row.weight, 2)), cell(number(row.running)),
    cell(running ? `${Math.round((100 * row.running) / running)} %` : "–"), cell(`${Math.round((100 * (row.weight ?? 1)) / weights)} %`),
    cell(number(row.waiting)), cell(number(row.tokens)), h("td", {}, ...actions));
}

function workerRow(worker) {
  const late = worker.seen_s > 7.5;
  const isReady = worker.state === "ready";
  const held = (state.held ?? []).filter((job) => job.worker === worker.incarnation).length; // now, not at its last word
  const [text, kind] = late ? ["silent", "bad"] : isReady ? ["ready", ""] : [`${worker.state} since ${clock(worker.since_s)}`, "warn"];
  const drain = button("Drain", act(`Drain the worker ${worker.incarnation}? It takes no more jobs, gives back those that do not end in time, and exits.`, `/v1/workers/${encodeURIComponent(worker.incarnation)}/drain`), `Drain ${worker.incarnation}`);
  const busy = worker.gpu_share === null ? "" : `, ${Math.round(100 * worker.gpu_share)} % busy`;
  const deviceCell = h("td", { class: worker.notice ? "warn" : "" }, `${worker.device || "–"}${busy}${worker.notice ? `; ${worker.notice}` : ""}`);
  const free = worker.num_running ? worker.num_free_blocks : worker.num_blocks;
  return h("tr", {}, cell(worker.incarnation, ""), deviceCell, cell(worker.version, ""), h("td", { class: kind }, text),
    cell(number(isReady && state.held.length < MAX_HELD ? held : worker.num_jobs_held)), cell(number(worker.num_places)), cell(number(worker.num_running)), cell(number(worker.num_waiting)),
    cell(number(worker.num_blocks ? worker.num_blocks * worker.kv_usage : null)), cell(number(worker.num_cached_blocks)), cell(number(free - (worker.num_cached_blocks ?? 0))),
    cell(seconds(worker.seen_s)), h("td", {}, who.is_admin && worker.state !== "draining" ? drain : null));
}

// One that no heartbeat has named yet.
function startRow(of) {
  return h("tr", {}, cell("–", ""), h("td", { colspan: 2 }), h("td", { class: "warn", colspan: 10 }, `starting since ${clock(of.since_s)}, expected in ${seconds(of.ready_in_s)}`));
}

// --- the batch as it runs ---------------------------------------------------------------------

const stripes = new Map(); // job and attempt -> {row, job, ended_s}
const preempted = []; // times

function noteBatch() {
  const keyOf = (job) => `${job.job_id} ${job.attempt} ${job.worker}`;
  const now = new Map((state.held ?? []).map((job) => [keyOf(job), job]));
  const taken = new Map(); // worker -> its rows that are in use
  for (const [key, stripe] of stripes) {
    if (!now.has(key)) stripe.ended_s ||= state.at;
    if (stripe.ended_s && state.at - stripe.ended_s > SHOWN_S) stripes.delete(key);
    if (!stripe.ended_s) rowsOf(taken, stripe.job.worker).add(stripe.row);
  }
  for (const [key, job] of now) {
    const known = stripes.get(key);
    if (known) { known.job = job; continue; }
    const used = rowsOf(taken, job.worker);
    let row = 0;
    while (used.has(row)) row += 1;
    used.add(row);
    stripes.set(key, { row, job, ended_s: 0 });
  }
  if (Object.values(state.newest ?? {}).some((point) => point.preemptions > 0)) preempted.push(state.at);
  while (preempted.length && state.at - preempted[0] > SHOWN_S) preempted.shift();
}

function rowsOf(taken, worker) {
  if (!taken.has(worker)) taken.set(worker, new Set());
  return taken.get(worker);
}

function drawBatch() {
  const names = (state.workers ?? []).filter((each) => each.model === model() && each.state === "ready").map((each) => each.incarnation);
  choose("worker", names.length ? names : [...new Set((state.held ?? []).map((job) => job.worker))]);
  drawStripes();
  drawSteps();
  const held = (state.held ?? []).filter((job) => job.worker === $("worker").value);
  rows("held", held.map((job) => {
    const phase = job.first_token_ms ? "decode" : "prefill";
    return h("tr", {}, h("td", {}, jobLink(job.job_id)), cell(job.tenant, ""), cell(job.lane, ""), cell(phase, ""),
      cell(seconds(Math.max(0, state.at - (job.first_token_ms || job.claimed_ms) / 1000))), cell(number(job.num_prompt_tokens)),
      cell(number(job.num_output_tokens)), cell(number(job.max_output_tokens)), cell(number(job.attempt)));
  }));
}

function drawStripes() {
  const canvas = $("stripes");
  const mine = [...stripes.values()].filter((stripe) => stripe.job.worker === $("worker").value);
  const num = Math.max(8, ...mine.map((stripe) => stripe.row + 1));
  const height = Math.min(600, Math.max(96, 14 * num));
  const width = Math.max(300, canvas.clientWidth);
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== width * ratio || canvas.height !== height * ratio) { canvas.width = width * ratio; canvas.height = height * ratio; }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = colour("--raised");
  pen.fillRect(0, 0, width, height);
  const x = (s) => width * (1 - (state.at - s) / SHOWN_S);
  const tall = height / num;
  for (const { row, job, ended_s } of mine) {
    const begin = job.claimed_ms / 1000, first = job.first_token_ms / 1000, end = ended_s || state.at;
    const bar = (from, to, name) => {
      pen.fillStyle = colour(name);
      pen.globalAlpha = ended_s ? 0.55 : 1;
      pen.fillRect(Math.max(0, x(from)), row * tall + 1, Math.max(1, x(to) - Math.max(0, x(from))), Math.max(1, tall - 2));
      pen.globalAlpha = 1;
    };
    bar(begin, first || end, "--prefill");
    if (first && first < end) bar(Math.max(first, begin), end, "--decode");
    if (job.attempt > 1) { pen.fillStyle = "#ffffff"; pen.fillRect(x(begin), row * tall, 2, tall); }
  }
  pen.fillStyle = colour("--bad");
  for (const at of preempted) pen.fillRect(x(at), 0, 1, height);
  const running = mine.filter((stripe) => !stripe.ended_s);
  const prefill = running.filter((stripe) => !stripe.job.first_token_ms).length;
  canvas.setAttribute("aria-label", `The places of the batch: ${prefill} in prefill, ${running.length - prefill} in decode, over the last minute`);
}

let steps = null;
let stepsOf = null; // the model that it shows
function drawSteps() {
  const found = (state.steps ?? []).filter((each) => each.model === model()).sort((a, b) => a.batch - b.batch);
  if (!steps) {
    const series = [["measured"], ["predicted"]];
    const plain = axes(seconds);
    plain[0].incrs = [1, 2, 4, 8, 16, 32, 64, 128, 256]; // no half sequences
    steps = new uPlot({
      width: Math.max(200, $("steps").clientWidth), height: 220, legend: { live: false }, cursor: { drag: { x: false, y: false } }, scales: { x: { time: false } }, axes: plain,
      series: [{ label: "sequences in a step" }, ...series.map(([label], i) => ({ label, stroke: colour(LINES[i]), width: 2, points: { show: true, size: 6 }, value: (_, value) => seconds(value) }))],
    }, [[], [], []], $("steps"));
    new ResizeObserver(() => steps.setSize({ width: Math.max(200, $("steps").clientWidth), height: 220 })).observe($("steps"));
  }
  if (!found.length && stepsOf === model()) return; // what was computed last stays
  stepsOf = model();
  $("no-steps").hidden = found.length > 0;
  $("steps").parentElement.hidden = found.length === 0;
  steps.setData([found.map((each) => each.batch), found.map((each) => each.took_s), found.map((each) => each.predicted_s)]);
}

// --- jobs -------------------------------------------------------------------------------------

let after = "";
let lastId = "";
let chosen = "";
const owners = new Map(); // job -> tenant
let isShown = false; // the chosen job: it was scrolled to once
const jobLink = (id) => h("a", { href: `#jobs/${id}`, title: id }, short(id));

function filter() {
  const found = {};
  if ($("f-status").value) found.status = $("f-status").value;
  if ($("f-lane").value) found.lane = $("f-lane").value;
  if ($("f-code").value) found.error_code = $("f-code").value;
  if ($("f-model").checked) found.model = model();
  found.tenant = who.is_admin ? $("f-tenant").value || "*" : who.tenant;
  if ($("f-minutes").value) found.created_after = Date.now() / 1000 - 60 * Number($("f-minutes").value);
  const [name, value] = $("f-metadata").value.split(/=(.*)/s);
  if (name && value !== undefined) found.metadata = { [name]: value };
  return found;
}

function query() {
  const words = new URLSearchParams({ limit: 25 });
  for (const [name, value] of Object.entries(filter())) {
    if (name === "metadata") for (const [key, word] of Object.entries(value)) words.append(`metadata[${key}]`, word);
    else words.append(name, value);
  }
  if (after) words.append("after", after);
  return words;
}

async function refreshJobs() {
  const found = await attempt(() => json(`/v1/jobs?${query()}`));
  if (!found) return;
  lastId = found.has_more ? found.last_id : "";
  $("older").disabled = !lastId;
  for (const job of found.data) owners.set(job.id, job.tenant);
  rows("list", found.data.map((job) => h("tr", {}, h("td", {}, jobLink(job.id)), h("td", { class: tone(job.status) }, stateText(job)),
    cell(job.tenant, ""), cell(job.lane, ""), cell(job.model, ""), cell(job.endpoint, ""), cell(clock(job.timings.queued_at), ""), cell(seconds(job.wait_s)), cell(between(job.timings, "started_at", "finished_at")),
    cell(number(job.usage?.prompt_tokens)), cell(number(job.usage?.completion_tokens)), cell(job.error?.code ?? "", ""))));
  const dead = await attempt(() => json("/v1/callbacks/dead?limit=25"));
  $("replay-dead").disabled = !dead?.data.length;
  rows("dead", (dead?.data ?? []).map((each) => h("tr", {}, h("td", {}, jobLink(each.id)), cell(each.type, ""), cell(number(each.attempts)), cell(each.last_error, "wrap"), cell(clock(each.died_at), ""),
    h("td", {}, button("Replay", act("Deliver this callback again?", `/v1/callbacks/dead/${each.id}/replay`), `Replay the callback of ${each.id}`)))));
  if (chosen) await refreshJob();
}

const stateText = (job) => (job.waiting_for === "worker" ? `waiting for a worker, expected in ${seconds(job.expected_start_s)}` : job.status);

function pathOf(id, what = "") {
  const owner = owners.get(id) ?? (state?.held ?? []).find((each) => each.job_id === id)?.tenant ?? who.tenant;
  return `/v1/jobs/${encodeURIComponent(id)}${what}${owner === who.tenant ? "" : `?${new URLSearchParams({ tenant: owner })}`}`;
}

function markText({ kind, started_at, ended_at, times, tokens }) {
  const spent = ended_at > started_at ? `, in ${seconds(ended_at - started_at)}` : "";
  const what = kind === "prefill" ? `${number(tokens)} tokens computed in ${number(times)} ${times === 1 ? "chunk" : "chunks"}`
    : `${kind}${times > 1 ? ` ${number(times)} times` : ""}, ${number(tokens)} tokens to be computed again`;
  return `${clock(started_at)}: ${what}${spent}`;
}

async function refreshJob() {
  const job = await attempt(() => json(pathOf(chosen)));
  if (!job) { chosen = ""; return; }
  const parts = phases(job.timings, state?.at ?? Date.now() / 1000).map(([name, from, to]) => h("li", {}, h("span", { class: `key ${name}` }), `${name} ${clock(from)}, ${seconds(Math.max(0, to - from))}`));
  const held = (state?.held ?? []).find((each) => each.job_id === job.id);
  const facts = [`state: ${stateText(job)}`, `lane ${job.lane}, model ${job.model}`, `attempt ${job.attempt}${job.attempt > 1 ? " (resumed)" : ""}`,
    ...job.runs.flatMap((run, i) => [
      `${i ? "resumed" : "claimed"} at ${clock(run.started_at)} by worker ${run.worker}${run.after_event ? `, after ${number(run.after_event)} events of its log` : ""}`,
      ...run.marks.map(markText)]),
    held ? `on worker ${held.worker}, ${number(held.num_output_tokens)} of ${number(held.max_output_tokens)} tokens` : null,
    job.cost === null ? null : `cost ${money(job.cost)}`,
    job.error ? `${job.error.code}: ${job.error.message}` : null,
    job.callback ? `callback ${job.callback.state}, ${job.callback.attempts} attempts` : null,
    Object.keys(job.metadata).length ? `metadata: ${JSON.stringify(job.metadata)}` : null];
  const over = !["queued", "running"].includes(job.status);
  const lane = h("input", { "aria-label": "Another lane", size: 10, value: job.lane, id: "to-lane" });
  const open = $("job").querySelector("pre");
  $("job").replaceChildren(h("h2", {}, `Job ${job.id}`), h("ul", {}, ...facts.filter(Boolean).map((fact) => h("li", {}, fact)), ...parts),
    h("div", { class: "row" },
      over ? null : h("button", { onclick: act(`Cancel the job ${job.id}?`, pathOf(job.id, "/cancel")) }, "Cancel"),
      over ? null : lane,
      over ? null : h("button", { onclick: () => act(`Move the job to the lane ${$("to-lane").value}?`, pathOf(job.id), { method: "PATCH", body: { lane: $("to-lane").value } })() }, "Move to this lane"),
      job.tenant === who.tenant ? h("button", { onclick: () => showOutput(job.id) }, "Show its events, with output") : null),
    ...(job.members ? [tree(job)] : []), ...(open ? [open] : []));
  if (!isShown) { isShown = true; $("job").scrollIntoView(); }
}

// Only now, by a click and with the tenant's own rights, the page asks for text.
async function showOutput(id) {
  const shown = h("pre", { tabindex: 0, "aria-label": "Events" });
  $("job").append(shown);
  await attempt(async () => {
    for await (const { event, data } of events(await call(`/v1/jobs/${encodeURIComponent(id)}/events`))) shown.append(`${event || "event"} ${data}\n`);
  });
}

async function cancelAll(found, text) {
  if (!(await confirmed(`Cancel ${text}? This cannot be undone.`))) return;
  await operate("/v1/jobs/cancel", found);
}

async function operate(path, found) {
  const begun = await attempt(() => json(path, { method: "POST", body: found }));
  if (!begun) return;
  $("operation").hidden = false;
  for (let each = begun; ; each = await json(`/v1/operations/${begun.id}`)) {
    $("operation").textContent = `${each.id}: ${each.status}, ${number(each.matched)} found, ${number(each.done)} done, ${number(each.failed)} failed`;
    if (each.status !== "running") break;
    await sleep(300);
  }
  await refresh();
}

// --- flows and batches ------------------------------------------------------------------------

const trees = new Map(); // a flow's job -> what was shown of it

// A flow with its calls, each with its times as a bar over the flow's, and its cost.
function tree(job) {
  const { queued_at, finished_at } = job.timings;
  const to = finished_at ?? state?.at ?? Date.now() / 1000;
  return h("ul", { class: "tree" }, branch({ ...job, job_id: job.id }, queued_at, Math.max(to, queued_at + 0.001)));
}

function branch(call, from, to) {
  const { prompt_tokens, completion_tokens } = call.usage ?? {};
  const facts = [`began ${clock(call.timings?.started_at)}`, `waited ${between(call.timings, "queued_at", "started_at")}`,
    `first token after ${between(call.timings, "started_at", "first_token_at")}`, `took ${between(call.timings, "started_at", "finished_at")}`,
    `${number(prompt_tokens)} in, ${number(completion_tokens)} out`, call.cost == null ? null : `cost ${money(call.cost)}`];
  const inner = (call.members ?? []).map((member) => branch(member, from, to));
  return h("li", {}, h("div", { class: "call" }, h("span", {}, jobLink(call.job_id), ` ${call.model}: `, h("span", { class: tone(call.status) }, call.status)), bar(call.timings, from, to),
    h("span", { class: "weak facts" }, facts.filter(Boolean).join("; "))), inner.length ? h("ul", { class: "tree" }, ...inner) : null);
}

const between = (timings, from, to) => (timings?.[from] && timings[to] ? seconds(Math.max(0, timings[to] - timings[from])) : "–");

function bar(timings, from, to) {
  const parts = timings ? phases(timings, to) : [];
  const place = (s) => 100 * Math.min(1, Math.max(0, (s - from) / (to - from)));
  const shown = parts.map(([name, begin, end]) => {
    const part = h("span", { class: `part ${name}` });
    part.style.left = `${place(begin)}%`; // by script: the policy forbids the attribute
    part.style.width = `${place(end) - place(begin)}%`;
    return part;
  });
  return h("span", { class: "times", role: "img", "aria-label": parts.map(([name, begin, end]) => `${name} ${seconds(Math.max(0, end - begin))}`).join(", ") || "no times" }, ...shown);
}

async function refreshFlows() {
  const batches = await attempt(() => json("/v1/batches?limit=20").catch((error) => (error.code === "no_object_store" ? { data: [] } : Promise.reject(error))));
  rows("batches", (batches?.data ?? []).map((batch) => {
    const { total, completed, failed } = batch.request_counts;
    const errors = (batch.errors?.data ?? []).map((error) => error.code);
    return h("tr", {}, cell(batch.id, ""), cell(batch.status, ""), h("td", {}, h("progress", { max: Math.max(1, total), value: completed + failed, "aria-label": `Progress of ${batch.id}` })),
      cell(number(completed)), cell(number(failed)), cell(number(total)), cell(clock(batch.created_at), ""), cell(counted(errors), ""));
  }));
  const flows = (await attempt(() => json("/v1/models")))?.data.filter((card) => card.flow) ?? [];
  $("no-flows").hidden = flows.length > 0;
  const found = [];
  for (const card of flows) {
    const jobs = (await attempt(() => json(`/v1/jobs?${new URLSearchParams({ model: card.id, limit: 5 })}`)))?.data ?? [];
    for (const job of jobs) {
      const known = trees.get(job.id);
      const isPriced = known?.cost === null && Object.keys(state?.prices ?? {}).length > 0;
      if (!known || isPriced || known.status !== job.status || !["succeeded", "failed", "cancelled", "expired"].includes(job.status)) {
        const whole = await attempt(() => json(`/v1/jobs/${job.id}`));
        if (whole) trees.set(job.id, whole);
      }
    }
    found.push(h("h3", {}, `${card.id} (${card.flow})`), ...jobs.map((job) => tree(trees.get(job.id) ?? job)));
  }
  $("trees").replaceChildren(...found);
}

function counted(words) {
  const found = {};
  for (const word of words) found[word] = (found[word] ?? 0) + 1;
  return Object.entries(found).map(([word, num]) => `${num} ${word}`).join(", ");
}

// --- the feed ---------------------------------------------------------------------------------

function choose(id, names) {
  const select = $(id);
  if (JSON.stringify([...select.options].map((option) => option.value)) === JSON.stringify(names)) return;
  const before = select.value;
  select.replaceChildren(...names.map((name) => h("option", { selected: name === before }, name)));
}

function draw() {
  if (!state || document.hidden) return;
  if (view() === "overview") drawOverview();
  if (view() === "batch") drawBatch();
}

let refreshed_ms = 0;
let refreshing = false;
async function refresh() {
  if (refreshing || document.hidden) return;
  refreshing = true;
  try {
    refreshed_ms = Date.now();
    if (view() === "overview") pauses = (await attempt(() => json("/v1/lanes/paused")))?.data ?? pauses;
    if (view() === "jobs") await refreshJobs();
    if (view() === "flows") await refreshFlows();
    draw();
  } finally {
    refreshing = false;
  }
}

function take(event, data) {
  if (event === "past") for (const [name, points] of Object.entries(data)) past.set(name, points);
  if (event !== "state" || !data.models) return;
  state = data;
  for (const [name, point] of Object.entries(state.newest ?? {})) {
    if (!past.has(name)) past.set(name, []);
    const points = past.get(name);
    if (points.at(-1)?.at !== point.at) points.push(point);
    while (points.length && point.at - points[0].at > PAST_S) points.shift();
  }
  choose("model", state.models.map((each) => each.name));
  noteBatch();
  $("live").textContent = state.is_broker_up ? `live ${clock(state.at)}` : "Redis does not answer";
  $("live").className = state.is_broker_up ? "good" : "bad";
  draw();
  if (Date.now() - refreshed_ms > 1000 * REFRESH_S) refresh();
}

async function listen() {
  for (;;) {
    try {
      for await (const { event, data } of events(await call("/console/feed"))) take(event, JSON.parse(data));
    } catch (error) {
      if (error.status === 401) return;
    }
    $("live").textContent = "connection lost, trying again";
    $("live").className = "bad";
    await sleep(RETRY_MS);
  }
}

function follow() {
  const [name, id] = location.hash.slice(1).split("/");
  if (id) { chosen = id; isShown = false; $("job").replaceChildren(); }
  show(VIEWS.includes(name) ? name : "overview");
}

for (const name of VIEWS) {
  $(`tab-${name}`).addEventListener("click", () => show(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = VIEWS[(VIEWS.indexOf(name) + step + VIEWS.length) % VIEWS.length];
    show(next);
    $(`tab-${next}`).focus();
  });
}
for (const id of ["model", "worker"]) $(id).addEventListener("change", draw);
for (const id of ["f-status", "f-lane", "f-tenant", "f-code", "f-metadata", "f-minutes", "f-model"]) $(id).addEventListener("change", () => { after = ""; refresh(); });
$("older").addEventListener("click", () => { after = lastId; refresh(); });
$("newest").addEventListener("click", () => { after = ""; refresh(); });
$("cancel-all").addEventListener("click", () => cancelAll(filter(), "all jobs that these filters match"));
$("replay-all").addEventListener("click", async () => (await confirmed("Submit all ended jobs that these filters match again?")) && operate("/v1/jobs/replay", filter()));
$("replay-dead").addEventListener("click", async () => (await confirmed("Deliver all dead callbacks again?")) && operate("/v1/callbacks/dead/replay", { tenant: $("f-tenant").value || who.tenant }));
window.addEventListener("hashchange", follow);
document.addEventListener("visibilitychange", () => { draw(); refresh(); });

if (await enter()) {
  $("f-tenant-label").hidden = !who.is_admin;
  follow();
  listen();
}
