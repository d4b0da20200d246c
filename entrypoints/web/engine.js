// The engine's numbers, from /metrics: plots of the last minute, and steps and cache as in a terminal.

import { $ } from "./base.js";
import { call, refusal } from "./server.js";

const WINDOW = 60_000; // Milliseconds that the plots show.
const LINES = 200; // Of the terminal.
const BAR = 24; // Letters of the cache's bar.
const IDLE = "idle";
const PREFIXES = ["jackfield:", "vllm:"];

/** Letters, columns of a line: [name, width, whether narrow windows have it, value as text]. */
const COLUMNS = [
  ["time", 8, true, (now) => new Date(now.clock).toTimeString().slice(0, 8)],
  ["steps", 7, true, (now, one) => one.steps.toFixed(0)],
  ["tok/step", 10, false, (now, one) => (one.steps ? (one.tokens / one.steps).toFixed(1) : "-")],
  ["ms/step", 9, true, (now, one) => (one.steps ? ((1000 * one.seconds) / one.steps).toFixed(1) : "-")],
  ["run", 5, true, (now) => now.num_requests_running.toFixed(0)],
  ["wait", 6, true, (now) => now.num_requests_waiting.toFixed(0)],
  ["prompt/s", 10, false, (now, one) => (one.prompt / one.span).toFixed(0)],
  ["tokens/s", 10, true, (now, one) => (one.generated / one.span).toFixed(0)],
  ["kv%", 7, true, (now) => (100 * now.kv_cache_usage_perc).toFixed(1)],
  ["hit%", 7, false, (now, one) => share(one.hits, one.queries)],
];
const share = (part, whole) => (whole > 0 ? ((100 * part) / whole).toFixed(0) : "-");

const samples = [];
let lines = [];
let before = null; // The sample of the last line.
let timer = 0;
let busy = () => false;

/** Sums of the engine's samples, by name without prefix; usage is the mean of several engines'. */
function read(text) {
  const prefix = PREFIXES.find((one) => text.includes(`\n${one}num_requests_running{`));
  if (!prefix) throw new Error("no metrics of an engine");
  const sums = { at: performance.now(), clock: Date.now() };
  let engines = 0;
  for (const line of text.split("\n")) {
    if (!line.startsWith(prefix)) continue;
    const name = line.slice(prefix.length, line.indexOf("{"));
    sums[name] = (sums[name] ?? 0) + Number(line.slice(line.lastIndexOf(" ")));
    if (name === "kv_cache_usage_perc") engines += 1;
  }
  sums.kv_cache_usage_perc /= engines;
  return sums;
}

/** Look at the numbers now, and again soon: sooner while an answer is written. */
export async function look() {
  clearTimeout(timer);
  timer = setTimeout(look, busy() ? 250 : 1000);
  if (document.hidden) return;
  try {
    const response = await call("metrics");
    if (!response.ok) throw await refusal(response);
    const now = read(await response.text());
    samples.push(now);
    while (samples[0].at < now.at - 2 * WINDOW) samples.shift();
    $("engine-note").hidden = true;
    draw(now);
    write(now);
  } catch {
    $("engine-note").textContent = "/metrics gives no numbers at the moment.";
    $("engine-note").hidden = false;
  }
}

/** Begin to look. `writing`: whether an answer is being written. */
export function watch(writing) {
  busy = writing;
  document.addEventListener("visibilitychange", look);
  look();
}

// ---------------------------------------------------------------- the plots

function draw(now) {
  const percent = `${(now.kv_cache_usage_perc * 100).toLocaleString("en", { maximumFractionDigits: 1 })} %`;
  $("running").textContent = now.num_requests_running;
  $("waiting").textContent = now.num_requests_waiting;
  $("cache").textContent = percent;
  const most = Math.max(4, ...samples.map((one) => Math.max(one.num_requests_running, one.num_requests_waiting)));
  const highest = Math.max(...samples.map((one) => one.kv_cache_usage_perc));
  plot("requests", "running", "num_requests_running", now.at, most);
  plot("requests", "waiting", "num_requests_waiting", now.at, most);
  plot("kv", "cache", "kv_cache_usage_perc", now.at, highest > 0.25 ? 1 : highest > 0.025 ? 0.25 : 0.025);
  const told = `Requests: ${now.num_requests_running} running, ${now.num_requests_waiting} waiting`;
  $("requests").setAttribute("aria-label", told);
  $("kv").setAttribute("aria-label", `KV cache in use: ${percent}`);
}

function plot(id, kind, name, now, top) {
  const [width, height] = [240, 44];
  const points = samples.map((one) => {
    const x = width - ((now - one.at) / WINDOW) * width;
    return `${x.toFixed(1)} ${(height - 1 - (one[name] / top) * (height - 4)).toFixed(1)}`;
  });
  const line = `M${points.join("L")}`;
  const from = points[0].split(" ")[0];
  $(id).querySelector(`.line.${kind}`).setAttribute("d", line);
  $(id).querySelector(`.area.${kind}`)?.setAttribute("d", `${line}V${height}H${from}Z`);
}

// ---------------------------------------------------------------- the terminal

/** What has come between two samples. */
function between(now, last) {
  const rise = (name) => Math.max(0, (now[name] ?? 0) - (last[name] ?? 0));
  return {
    span: (now.at - last.at) / 1000,
    steps: rise("iteration_seconds_count"),
    seconds: rise("iteration_seconds_sum"),
    tokens: rise("iteration_tokens_total_sum"),
    prompt: rise("prompt_tokens_total"),
    generated: rise("generation_tokens_total"),
    hits: rise("prefix_cache_hits_total"),
    queries: rise("prefix_cache_queries_total"),
  };
}

/** A line a second; one in all for a time in which nothing happens. */
function write(now) {
  before ??= now;
  if (now.at - before.at >= 950) {
    const one = between(now, before);
    const still = !one.steps && !now.num_requests_running && !now.num_requests_waiting;
    if (!still || lines.at(-1)?.one !== IDLE) lines.push({ now, one: still ? IDLE : one });
    lines = lines.slice(-LINES);
    before = now;
  }
  if (!$("watch").hidden) show(now);
}

function show(now) {
  const shown = COLUMNS.filter(([, , narrow]) => narrow || $("watch").clientWidth > 620);
  const filled = Math.round(now.kv_cache_usage_perc * BAR);
  const bar = "█".repeat(filled) + "·".repeat(BAR - filled);
  const facts = [
    `prefix hits ${share(now.prefix_cache_hits_total, now.prefix_cache_queries_total)} %`,
    `preemptions ${now.num_preemptions_total}`,
  ];
  if (now.spec_decode_num_draft_tokens_total > 0) {
    const right = share(now.spec_decode_num_accepted_tokens_total, now.spec_decode_num_draft_tokens_total);
    facts.push(`drafts accepted ${right} %`);
  }
  $("cache-line").textContent =
    `KV cache [${bar}] ${(100 * now.kv_cache_usage_perc).toFixed(1)} %\nsince the start: ${facts.join(", ")}`;
  $("steps-head").textContent = shown.map(([name, width]) => name.padStart(width)).join("");
  const text = lines.map(({ now: at, one }) => (one === IDLE
    ? COLUMNS[0][3](at).padStart(COLUMNS[0][1]) + `  ${IDLE}`
    : shown.map(([, width, , value]) => value(at, one).padStart(width)).join("")));
  const log = $("steps");
  const there = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  log.textContent = text.join("\n");
  if (there) log.scrollTop = log.scrollHeight;
}

/** Open or close the terminal. */
export function showTerminal(open) {
  $("watch").hidden = !open;
  if (!open || !samples.length) return;
  show(samples.at(-1));
  $("steps").scrollTop = $("steps").scrollHeight;
}
