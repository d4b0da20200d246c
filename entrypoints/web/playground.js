// The playground: a chat over the server's own HTTP API. What a model says becomes text nodes and
// the elements of markdown.js, never HTML.

import { Attachments, Microphone, drawPart, fileOf } from "./attachments.js";
import { $, duration, element, inBrowser, inTab, plural } from "./base.js";
import { conversation, conversations, forget, keepConversation } from "./conversations.js";
import { look, showTerminal, watch } from "./engine.js";
import { Markdown } from "./markdown.js";
import { Refused, call, events, refusal } from "./server.js";

const NARROW = matchMedia("(max-width: 60rem)");
const EXAMPLE = `[{
  "type": "function",
  "function": {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
      "type": "object",
      "properties": {"city": {"type": "string"}},
      "required": ["city"]
    }
  }
}]`;
const SHORTEST = 20; // Milliseconds: what took less came in one piece, and has no speed to tell of.

/** What the user has to put right, and where. */
class Wrong extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

// ---------------------------------------------------------------- the models

let models = new Map(); // Name → card.

const takes = () => models.get($("model").value)?.input_modalities ?? ["text"];

/** Another model, which may take other things than text. */
function chosen() {
  $("asked").textContent = $("model").value;
  attached.takes = takes();
  for (const [id, kinds] of [["attach", ["image", "audio"]], ["speak", ["audio"]]]) {
    $(id).hidden = !kinds.some((kind) => attached.takes.includes(kind));
  }
  $("file").accept = attached.takes.map((kind) => `${kind}/*`).join();
}

async function loadModels() {
  const select = $("model");
  try {
    const response = await call("v1/models");
    if (!response.ok) throw await refusal(response);
    const cards = (await response.json()).data;
    const before = select.value;
    models = new Map(cards.map((card) => [card.id, card]));
    select.replaceChildren(...cards.map((card) => element("option", {
      value: card.id, textContent: card.id, title: `context: ${plural(card.max_model_len, "token")}`,
    })));
    select.disabled = false;
    if (cards.some((card) => card.id === before)) select.value = before;
    chosen();
    needKey(false);
    status("");
  } catch (error) {
    select.disabled = true;
    needKey(error.status === 401);
    status(error.status === 401
      ? "This server needs an API key: put it in under Settings."
      : `The models could not be listed: ${error.message}`);
  }
}

function needKey(needed) {
  $("key").setAttribute("aria-invalid", String(needed));
  $("key-note").textContent = needed
    ? "This server needs a key. It is kept in this tab only."
    : "Kept in this tab only, and forgotten with it.";
}

// ---------------------------------------------------------------- settings

function parsed(field, accept) {
  const text = field.value.trim();
  const told = $(`${field.id}-wrong`);
  try {
    const value = text ? accept(JSON.parse(text)) : null;
    told.textContent = "";
    field.removeAttribute("aria-invalid");
    return value;
  } catch (error) {
    told.textContent = error instanceof SyntaxError ? `Not JSON: ${error.message}` : error.message;
    field.setAttribute("aria-invalid", "true");
    throw new Wrong(field, told.textContent);
  }
}

const tools = () => parsed($("tools"), (value) => {
  const list = Array.isArray(value) ? value : [value];
  return list.map((tool) => {
    const wrapped = tool?.function ? tool : { type: "function", function: tool };
    if (typeof wrapped.function?.name !== "string") throw new Error("Each function needs a name.");
    return wrapped;
  });
});

const extra = () => parsed($("extra"), (value) => {
  if (typeof value !== "object" || Array.isArray(value)) throw new Error("It must be an object.");
  return value;
});

/** The body of a chat request. Raises Wrong. */
function request() {
  const body = {
    messages: $("system").value.trim()
      ? [{ role: "system", content: $("system").value.trim() }, ...messages]
      : messages,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (!$("model").disabled) body.model = $("model").value;
  for (const input of $("sampling").querySelectorAll("input")) {
    if (input.validity.badInput) throw new Wrong(input, `${input.dataset.field}: not a number`);
    if (input.value !== "") body[input.dataset.field] = Number(input.value);
  }
  const stops = $("stops").value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  const functions = tools();
  if (functions?.length) {
    body.tools = functions;
    if ($("choice").value) body.tool_choice = $("choice").value;
  }
  return { ...body, ...extra() };
}

/** The same, or null with the wrong field in focus. */
function checked() {
  try {
    return request();
  } catch (error) {
    if (!(error instanceof Wrong)) throw error;
    show(true);
    error.field.focus();
    status(error.message);
    return null;
  }
}

// ---------------------------------------------------------------- the conversation

const messages = [];
let kept = null; // {id, title} of this conversation in the browser.
const beside = new WeakMap(); // Message of a model → what is shown and not sent.
let running = null; // {answer, control: its AbortController} while one is written.
let waiting = null; // The calls whose results the user may give.

const status = (text) => { $("status").textContent = text; };

function drawTurn(kind, name, ...parts) {
  $("empty").hidden = true;
  const body = element("div", { className: "body" }, ...parts);
  const head = element("h2", { textContent: name, title: name });
  const turn = element("article", { className: `turn ${kind}` }, head, body);
  $("turns").append(turn);
  return { turn, body };
}

/** Keep the end in sight, for a reader who is there. */
function following(change) {
  const log = $("log");
  const there = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const result = change();
  if (there) log.scrollTop = log.scrollHeight;
  return result;
}

/** Text as it is: what a model thought. */
function plain(block) {
  const node = document.createTextNode("");
  block.append(node);
  return { append: (text) => node.appendData(text), draw() {} };
}

/** One answer of the model, drawn as it comes. */
class Answer {
  content = "";
  thought = "";
  calls = [];
  tokens = 0;
  /** Of `usage`, once it is known: how many drafts were right, and how many were not. */
  drafts = null;
  reason = null;
  began = performance.now();

  constructor(name) {
    this.start = messages.length;
    this.facts = element("p", { className: "facts", "aria-live": "off" });
    ({ turn: this.turn, body: this.body } = drawTurn("model", name, this.facts));
    this.turn.setAttribute("aria-busy", "true");
    this.say("Waiting for the first token");
  }

  say(...facts) {
    this.facts.replaceChildren(...facts.map((text) => element("span", { textContent: text })));
  }

  /** An event that came at `now`. */
  take(event, now) {
    if (event.type) {
      this.heard(event, now);
      return;
    }
    if (event.choices.length) {
      this.first ??= now;
      this.last = now;
    }
    this.tokens = event.usage?.completion_tokens ?? this.tokens;
    this.drafts = event.usage?.completion_tokens_details ?? this.drafts;
    for (const { index, delta, finish_reason: reason } of event.choices) {
      if (index !== 0) continue;
      const thought = delta.reasoning_content ?? delta.reasoning;
      if (thought) this.think(thought, now);
      if (delta.content) this.write(delta.content, now);
      for (const piece of delta.tool_calls ?? []) this.called(piece);
      this.reason = reason ?? this.reason;
    }
  }

  /** An event of a transcription. */
  heard({ delta }, now) {
    this.first ??= now;
    this.last = now;
    if (delta) this.write(delta, now);
  }

  add(...parts) {
    for (const part of parts) this.facts.before(part);
  }

  /** Text at the end of the block of this kind that is open, or of a new one. */
  put(kind, text, now, open) {
    if (this.open?.kind !== kind) {
      const shown = text.trimStart();
      if (!shown) return;
      this.rest();
      const block = element("div", { className: "text last" });
      const view = kind === "text" ? new Markdown(block) : plain(block);
      if (kind === "text") block.classList.add("markdown");
      this.open = { kind, view, began: now };
      view.append(shown);
      open(block);
    } else {
      this.open.view.append(text);
    }
  }

  /** Draw what has been added: once a frame. */
  draw(last = false) {
    this.open?.view.draw(last);
  }

  think(text, now) {
    this.thought += text;
    this.put("thought", text, now, (block) => {
      this.summary = element("summary", { textContent: "Thinking…" });
      this.add(element("details", { className: "thought" }, this.summary, block));
    });
    this.thoughtUntil = now;
  }

  write(text, now) {
    this.content += text;
    this.put("text", text, now, (block) => this.add(block));
  }

  /** Close the open block. */
  rest() {
    this.draw(true);
    this.turn.querySelector(".text.last")?.classList.remove("last");
    if (this.open?.kind === "thought") {
      const spent = this.thoughtUntil - this.open.began;
      this.summary.textContent = spent >= SHORTEST ? `Thought for ${duration(spent)}` : "Thought";
    }
    this.open = null;
  }

  called({ index, id, function: part }) {
    let made = this.calls[index];
    if (!made) {
      this.rest();
      const shown = document.createTextNode("");
      const card = element("section", { className: "call", "aria-label": `Tool call ${part.name}` },
        element("header", {}, element("h3", { textContent: part.name }),
          element("span", { className: "kind", textContent: "tool call" })),
        element("pre", {}, shown));
      this.add(card);
      made = this.calls[index] = { id, name: part.name, arguments: "", shown, card };
    }
    made.arguments += part.arguments ?? "";
    made.shown.data = made.arguments;
  }

  measure() {
    const facts = this.tokens ? [plural(this.tokens, "token")] : [];
    const spent = this.last - this.first;
    if (this.tokens > 1 && spent >= SHORTEST) {
      const rate = ((this.tokens - 1) * 1000) / spent;
      facts.push(`${rate.toLocaleString("en", { maximumFractionDigits: rate < 100 ? 1 : 0 })} tokens/s`);
    }
    facts.push(`first ${this.tokens ? "token" : "words"} after ${duration(this.first - this.began)}`);
    const { accepted_prediction_tokens: right, rejected_prediction_tokens: wrong } = this.drafts ?? {};
    if (right + wrong > 0) facts.push(`${right} of ${right + wrong} drafts accepted`);
    if (this.reason === "length") facts.push("cut off: out of tokens");
    if (this.reason === "abort") facts.push("aborted by the server");
    if (this.reason === "you") facts.push("stopped");
    this.say(...facts);
  }

  /** No more will come: into the history with it. */
  end() {
    this.rest();
    this.turn.removeAttribute("aria-busy");
    const calls = this.reason === "you" ? [] : this.calls;
    if (this.first === undefined) this.say(this.reason === "you" ? "stopped" : "no answer");
    else this.measure();
    if (!this.content && !calls.length) return;
    const message = { role: "assistant", content: this.content };
    if (calls.length) {
      if (this.thought) message.reasoning_content = this.thought;
      message.tool_calls = calls.map((one) => ({
        id: one.id, type: "function", function: { name: one.name, arguments: one.arguments },
      }));
    }
    messages.push(message);
    beside.set(message, {
      model: this.turn.querySelector("h2").textContent,
      thought: this.thought,
      facts: Array.from(this.facts.children, (fact) => fact.textContent),
    });
    if (calls.length) ask(this, calls);
    keep();
  }
}

/** A field for the result of each call. Results go to the model together. */
function ask(answer, calls) {
  for (const made of calls) {
    try {
      made.shown.data = JSON.stringify(JSON.parse(made.arguments), null, 2);
    } catch {
      // As the model wrote it.
    }
    made.field = element("textarea", { rows: 2, placeholder: "What the function returns", spellcheck: false, className: "code" });
    made.form = element("div", { className: "answer" },
      element("label", {}, `Result of ${made.name}`, made.field));
    made.card.append(made.form);
    made.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        give();
      }
    });
  }
  const button = element("button", {
    type: "button", className: "answers", textContent: calls.length > 1 ? "Send results" : "Send result",
  });
  const give = () => {
    if (running) return;
    settle();
    $("prompt").focus();
    respond();
  };
  button.addEventListener("click", give);
  answer.add(button);
  waiting = { calls, button };
}

/** What the user gave for the calls becomes the tools' messages. */
function settle() {
  if (!waiting) return;
  for (const { id, field, form } of waiting.calls) {
    const given = field.value.trim();
    messages.push({ role: "tool", tool_call_id: id, content: given });
    drawResult(form, given);
  }
  waiting.button.remove();
  waiting = null;
  keep();
}

function drawResult(form, given) {
  form.replaceChildren(element("label", { textContent: given ? "Result" : "No result was given" }));
  if (given) form.append(element("pre", { textContent: given }));
}

function again(turn, start) {
  if (running) return;
  waiting = null;
  messages.length = start;
  keep();
  while (turn.nextSibling) turn.nextSibling.remove();
  turn.remove();
  $("prompt").focus();
  respond();
}

function offerAgain(turn, start, place, text) {
  const button = element("button", { type: "button", className: "link", textContent: text });
  button.addEventListener("click", () => again(turn, start));
  place.append(button);
}

function drawError(answer, error) {
  const box = element("div", { className: "error", role: "alert" },
    element("p", { className: "text", textContent: error.message }));
  if (error.facts?.length) box.append(element("p", { textContent: error.facts.join(", ") }));
  offerAgain(answer.turn, answer.start, box, "Try again");
  answer.add(box);
  if (error.status === 401) needKey(true);
}

/** Draw once a frame, however many events a frame brings: a fast answer must not hold up keys. */
async function drawAll(response, answer) {
  const come = [];
  let frame = 0;
  const flush = () => {
    cancelAnimationFrame(frame);
    frame = 0;
    following(() => {
      for (const [event, now] of come.splice(0)) answer.take(event, now);
      answer.draw();
      if (answer.first !== undefined) answer.measure();
    });
  };
  try {
    for await (const event of events(response)) {
      come.push([event, performance.now()]);
      frame ||= requestAnimationFrame(flush);
      if (event.type === "transcript.text.done") break;
    }
  } finally {
    flush();
  }
}

function chat(body, signal) {
  return call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

/** Have the last recording written down, by a model that takes nothing else. */
async function transcription(body, signal) {
  const { content } = messages.findLast((message) => message.role === "user");
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  const spoken = parts.findLast((part) => part.type === "input_audio");
  if (!spoken) throw new Refused("This model writes speech down: attach a recording.");
  const form = new FormData();
  form.set("file", await fileOf(spoken));
  form.set("stream", "true");
  if (body.model) form.set("model", body.model);
  const text = parts.find((part) => part.type === "text")?.text;
  if (text) form.set("prompt", text);
  return call("v1/audio/transcriptions", { method: "POST", body: form, signal });
}

/** Let the model answer the conversation as it stands. */
async function respond() {
  const body = checked();
  if (!body) return;
  for (const link of $("turns").querySelectorAll(".link")) link.remove();
  const control = new AbortController();
  const answer = following(() => new Answer(body.model ?? "Model"));
  const own = (running = { answer, control });
  busy(true);
  let failed = null;
  try {
    const response = await (takes().includes("text") ? chat : transcription)(body, control.signal);
    if (!response.ok) throw await refusal(response);
    await drawAll(response, answer);
  } catch (error) {
    if (control.signal.aborted) answer.reason = "you";
    else failed = error instanceof TypeError ? new Refused("The server cannot be reached.") : error;
  }
  if (running !== own) return; // Another conversation is there, and this one was kept.
  running = null;
  following(() => {
    answer.end();
    if (failed) {
      drawError(answer, failed);
      if (answer.first === undefined) answer.say();
    }
    else offerAgain(answer.turn, answer.start, answer.facts, "again");
  });
  busy(false);
  if (failed) status("The request failed.");
  else if (answer.reason === "you") status("Stopped.");
  else if (waiting) status(`The model calls ${waiting.calls.map((one) => one.name).join(", ")}: give the result above.`);
  else status("Done.");
}

function busy(on) {
  const focused = document.activeElement;
  $("log").setAttribute("aria-busy", String(on));
  $("send").hidden = on;
  $("stop").hidden = !on;
  if (focused === $("send") || focused === $("stop")) $("prompt").focus();
  if (on) status("Answering…");
  look();
}

function send() {
  const text = $("prompt").value.trim();
  if (!(text || attached.parts.length) || running || !checked()) return;
  settle();
  const parts = attached.take();
  if (text) parts.push({ type: "text", text });
  const content = parts.length === 1 && text ? text : parts;
  messages.push({ role: "user", content });
  keep();
  $("prompt").value = "";
  fit();
  const { turn } = drawQuestion(content);
  turn.scrollIntoView({ block: "end" });
  $("log").scrollTop = $("log").scrollHeight;
  respond();
}

function drawQuestion(content) {
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  const drawn = parts.map((part) => drawPart(part)
    ?? element("div", { className: "text", textContent: part.text }));
  return drawTurn("you", "You", ...drawn);
}

// ---------------------------------------------------------------- what the browser keeps

function titleOf([{ content }]) {
  if (typeof content === "string") return content.slice(0, 80);
  const text = content.find((part) => part.type === "text")?.text;
  return text?.slice(0, 80) ?? (content[0].type === "image_url" ? "A picture" : "A recording");
}

/** Keep the conversation for the next time that this browser opens the page. */
async function keep() {
  if (!messages.length) return;
  kept ??= { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: titleOf(messages) };
  inTab("conversation", kept.id);
  const entries = messages.map((message) => ({ message, ...beside.get(message) }));
  const there = await keepConversation({ ...kept, at: Date.now(), entries });
  if (!there) status("This browser has no room to keep the conversation.");
}

/** Go to a conversation that was kept. */
async function open(id) {
  const one = await conversation(id);
  clear();
  if (!one) return;
  try {
    draw(one.entries);
    kept = { id, title: one.title };
    inTab("conversation", id);
  } catch {
    clear(); // Something else was kept under this name.
    forget(id);
  }
}

function draw(entries) {
  let answer = null;
  for (const { message, ...more } of entries) {
    if (message.role === "user") drawQuestion(message.content);
    else if (message.role === "assistant") answer = restored(message, more);
    else answer.results.push(message.content);
    messages.push(message);
    if (message.role === "assistant") beside.set(message, more);
    if (answer?.calls.length && answer.results.length === answer.calls.length) {
      settledBefore(answer);
      answer = null;
    }
  }
  if (!messages.length) return;
  if (answer?.calls.length) {
    ask(answer, answer.calls);
    return;
  }
  answer = messages.at(-1).role === "assistant" ? answer : cutOff();
  offerAgain(answer.turn, answer.start, answer.facts, "again");
}

/** The list of what is kept. */
async function list() {
  const all = await conversations();
  $("none").hidden = all.length > 0;
  $("chats").replaceChildren(...all.map(({ id, title, at }) => {
    const link = element("button", { type: "button", className: "one" },
      element("span", { textContent: title }),
      element("time", { textContent: new Date(at).toLocaleString() }));
    if (id === kept?.id) link.setAttribute("aria-current", "true");
    link.addEventListener("click", () => {
      $("kept").hidePopover();
      if (id !== kept?.id) open(id);
      $("prompt").focus();
    });
    const remove = element("button", {
      type: "button", className: "link", textContent: "Delete", "aria-label": `Delete: ${title}`,
    });
    remove.addEventListener("click", async () => {
      if (id === kept?.id) clear();
      await forget(id);
      await list();
      ($("chats").querySelector("button") ?? $("history")).focus();
    });
    return element("li", {}, link, remove);
  }));
}

function restored(message, { model, thought, facts }) {
  const answer = new Answer(model);
  if (thought) answer.think(thought, 0);
  if (message.content) answer.write(message.content, 0);
  for (const [index, one] of (message.tool_calls ?? []).entries()) answer.called({ index, ...one });
  answer.rest();
  answer.turn.removeAttribute("aria-busy");
  answer.say(...facts);
  answer.results = [];
  return answer;
}

function settledBefore({ calls, results }) {
  for (const [index, { card }] of calls.entries()) {
    const form = element("div", { className: "answer" });
    drawResult(form, results[index]);
    card.append(form);
  }
}

/** The place of an answer that a reload cut off. */
function cutOff() {
  const answer = new Answer("Model");
  answer.turn.removeAttribute("aria-busy");
  answer.say("no answer: the page was loaded again");
  return answer;
}

/** An empty page; what was answered so far is kept. */
function clear() {
  if (running) {
    const { answer, control } = running;
    running = null;
    answer.reason = "you";
    answer.end();
    control.abort();
    busy(false);
  }
  messages.length = 0;
  kept = null;
  inTab("conversation", "");
  waiting = null;
  $("turns").replaceChildren($("empty"));
  $("empty").hidden = false;
  status("");
}

function fresh() {
  clear();
  $("prompt").focus();
}

/** Grow with the text, where `field-sizing` is not known yet. */
function fit() {
  $("prompt").rows = Math.min(12, $("prompt").value.split("\n").length);
}

// ---------------------------------------------------------------- panel, theme, keys

function show(open) {
  document.body.dataset.panel = open ? "open" : "closed";
  $("settings").setAttribute("aria-expanded", String(open));
  const covered = open && NARROW.matches;
  document.querySelector(".bar").inert = covered;
  $("main").inert = covered;
}

function toggle(open) {
  show(open);
  if (open) (NARROW.matches ? $("close") : $("system")).focus();
  else $("settings").focus();
}

const THEMES = { "": "as the system has it", light: "light", dark: "dark" };

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  $("theme").setAttribute("aria-label", `Theme: ${THEMES[name]}`);
  $("theme").title = `Theme: ${THEMES[name]}`;
}

const fields = document.querySelectorAll(".panel :is(input, textarea, select)");
const nameOf = (field) => field.id || field.dataset.field;

for (const field of fields) {
  const area = field.id === "key" ? inTab : inBrowser; // A key is for this tab alone.
  field.value = area(nameOf(field));
  field.addEventListener("input", () => area(nameOf(field), field.value));
}
for (const [field, check] of [[$("tools"), tools], [$("extra"), extra]]) {
  field.addEventListener("change", () => {
    try {
      check();
    } catch {
      // It is told beside the field.
    }
  });
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running?.control.abort());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (document.querySelector(":popover-open")) return; // It closes by itself.
  if (running) running.control.abort();
  else if (NARROW.matches && document.body.dataset.panel === "open") toggle(false);
});
$("fresh").addEventListener("click", fresh);
$("key").addEventListener("change", loadModels);
$("model").addEventListener("change", chosen);
$("example").addEventListener("click", () => {
  $("tools").value = EXAMPLE;
  $("tools").dispatchEvent(new Event("input"));
  $("tools").dispatchEvent(new Event("change"));
});
$("settings").addEventListener("click", () => toggle(document.body.dataset.panel !== "open"));
$("close").addEventListener("click", () => toggle(false));
NARROW.addEventListener("change", () => show(!NARROW.matches));
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(inBrowser("theme")) + 1) % names.length];
  inBrowser("theme", next);
  theme(next);
});

// ---------------------------------------------------------------- pictures, recordings, terminal

const attached = new Attachments($("attached"), status);
const microphone = new Microphone(drawMicrophone, (file) => attached.add([file]));

function drawMicrophone() {
  $("speak").setAttribute("aria-pressed", String(microphone.recording));
  if (microphone.recording) status("Listening… press the microphone again to end.");
}

$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await attached.add($("file").files);
  $("file").value = "";
  $("prompt").focus();
});
$("speak").addEventListener("click", async () => {
  if (microphone.recording) {
    microphone.stop();
    return;
  }
  try {
    await microphone.start();
  } catch (error) {
    status(navigator.mediaDevices
      ? `The microphone cannot be used: ${error.message}`
      : "Browsers give pages the microphone over HTTPS or on localhost alone.");
  }
});
$("prompt").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length || event.clipboardData.types.includes("text/plain")) return;
  event.preventDefault();
  attached.add(event.clipboardData.files);
});
document.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attached.add(event.dataTransfer.files);
});

$("kept").addEventListener("beforetoggle", (event) => {
  $("history").setAttribute("aria-expanded", String(event.newState === "open"));
  if (event.newState === "open") list();
});

function terminal(open) {
  $("terminal").setAttribute("aria-pressed", String(open));
  inBrowser("terminal", open ? "open" : "");
  showTerminal(open);
}
$("terminal").addEventListener("click", () => terminal($("watch").hidden));

theme(THEMES[inBrowser("theme")] ? inBrowser("theme") : "");
show(!NARROW.matches);
chosen();
watch(() => running !== null);
terminal(inBrowser("terminal") === "open");
loadModels();
if (inTab("conversation")) open(inTab("conversation"));
