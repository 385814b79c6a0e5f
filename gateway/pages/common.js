// What the pages share: elements made of text alone, calls of the API, and who the browser is.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const $ = (id) => document.getElementById(id);

// One session for a page; `token` goes with each change.
export const who = { header: "x-csrf-token", token: "", tenant: "", is_admin: false, sees_fleet: false };

export class Refused extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = body?.error?.code ?? "";
    this.retry_s = 0;
  }
}

export async function call(path, { method = "GET", body, headers = {}, signal } = {}) {
  const given = { ...headers };
  if (method !== "GET" && who.token) given[who.header] = who.token;
  if (body !== undefined) given["content-type"] = "application/json";
  const answer = await fetch(path, {
    method, signal, headers: given, credentials: "same-origin",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) {
    const error = new Refused(answer.status, await answer.json().catch(() => null));
    error.retry_s = Number(answer.headers.get("retry-after") ?? 0);
    if (answer.status === 401) askForKey();
    throw error;
  }
  return answer;
}

export const json = async (path, options) => (await call(path, options)).json();

// Events of a stream: yields {event, id, data}.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const found = eventOf(part);
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => null);
  }
}

function eventOf(part) {
  const found = { event: "", id: "", data: "" };
  for (const line of part.split("\n")) {
    const at = line.indexOf(": ");
    const name = line.slice(0, at);
    if (at > 0 && name in found) found[name] += line.slice(at + 2);
  }
  return found;
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Whether the browser may call: shows the box for the key if not.
export async function enter() {
  try {
    Object.assign(who, await json("/console/session"));
  } catch (error) {
    if (error.status === 401) return false;
    throw error;
  }
  const shown = $("who");
  if (shown) {
    shown.replaceChildren(
      who.has_session ? `tenant ${who.tenant}${who.is_admin ? ", admin" : ""}` : "no key needed",
    );
    if (who.has_session) shown.append(" ", h("button", { class: "small", onclick: leave }, "Log out"));
  }
  return true;
}

async function leave() {
  await call("/console/session", { method: "DELETE" });
  location.reload();
}

function askForKey() {
  if ($("login")) return;
  const key = h("input", { type: "password", id: "login-key", autocomplete: "off", required: true });
  const wrong = h("p", { class: "bad", role: "alert" });
  const enterKey = async () => {
    const answer = await fetch("/console/session", {
      method: "POST", headers: { "content-type": "application/json" },
      body: JSON.stringify({ key: key.value }),
    });
    if (answer.ok) location.reload();
    else wrong.textContent = answer.status === 401 ? "This is no valid API key." : `The server answered ${answer.status}.`;
  };
  key.addEventListener("keydown", (event) => event.key === "Enter" && enterKey());
  const box = h("section", { id: "login", "aria-label": "Log in" },
    h("h2", {}, "An API key, please"),
    h("p", { class: "weak" }, "It is exchanged for a session of an hour, in a cookie that no script can read."),
    h("div", { class: "row" }, h("label", {}, "API key", key),
      h("button", { class: "main", onclick: enterKey }, "Log in")),
    wrong);
  document.querySelector("main").replaceChildren(box);
  key.focus();
}

export const seconds = (s) => {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(1000 * Math.max(0, s))} ms`; // a server's clock may be ahead
  if (s < 90) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  return s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
};
export const number = (n, digits = 0) =>
  n === null || n === undefined ? "–" : n.toLocaleString("en", { maximumFractionDigits: digits });
export const clock = (s) => (s ? new Date(1000 * s).toLocaleTimeString() : "–");
