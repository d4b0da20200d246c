// Sends a request to one of the server's routes, from its OpenAPI document. Answers are shown as text.

const $ = (id) => document.getElementById(id);
const ROOT = new URL("../", location.href); // The page is /docs/try, a proxy's prefix before it.
const EXAMPLES = {
  messages: [{ role: "user", content: "Hello!" }],
  prompt: "Once",
  input: "Hello!",
  max_tokens: 64,
  query: "What is a jackfield?",
  queries: "What is a jackfield?",
  documents: ["A jackfield is a patch panel."],
  text_1: "Hello!",
  text_2: "Good morning!",
  tokens: [1, 2, 3],
};
const EMPTY = { string: "", integer: 0, number: 0, boolean: false, array: [], object: {} };

let openapi = null;
let model = null;
let running = null;

/** [method, path, operation] of what can be sent from here: with a JSON body, or without one. */
function operations() {
  const list = [];
  for (const [path, methods] of Object.entries(openapi.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const kinds = Object.keys(operation.requestBody?.content ?? {});
      if (!kinds.length || kinds.includes("application/json")) list.push([method, path, operation]);
    }
  }
  return list;
}

const nameOf = ([method, path]) => `${method} ${path}`;
const chosen = () => operations().find((one) => nameOf(one) === $("operation").value);

function resolved(schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? openapi.components.schemas[name] : schema;
}

/** A body to begin with: what is required, and what makes an answer. */
function example(operation) {
  const content = operation.requestBody?.content["application/json"];
  const schema = resolved(content?.schema?.anyOf?.[0] ?? content?.schema);
  if (!schema?.properties) return {};
  const body = {};
  for (const [name, field] of Object.entries(schema.properties)) {
    const needed = schema.required?.includes(name);
    if (name === "model" && model) body.model = model;
    else if (name in EXAMPLES && (needed || !schema.required?.includes("messages"))) body[name] = EXAMPLES[name];
    else if (name === "max_tokens") body[name] = EXAMPLES[name];
    else if (needed) body[name] = EMPTY[resolved(field).type] ?? null;
  }
  if (body.messages && body.prompt) delete body.prompt;
  return body;
}

function draw() {
  const [method, , operation] = chosen();
  $("summary").textContent = operation.summary ?? "";
  $("parameters").replaceChildren(...(operation.parameters ?? [])
    .filter((one) => one.in === "path" || one.in === "query")
    .map((one) => {
      const label = document.createElement("label");
      const input = document.createElement("input");
      input.dataset.name = one.name;
      input.dataset.in = one.in;
      input.required = one.in === "path";
      input.addEventListener("input", drawCurl);
      label.append(`${one.name} (${one.in})`, input);
      return label;
    }));
  const has = method !== "get" && Boolean(operation.requestBody);
  $("body-label").hidden = !has;
  $("body").value = has ? JSON.stringify(example(operation), null, 2) : "";
  drawCurl();
}

/** The request as it stands: address and options of fetch. */
function request() {
  const [method, path] = chosen();
  let place = path.slice(1);
  const query = new URLSearchParams();
  for (const { dataset, value } of $("parameters").querySelectorAll("input")) {
    if (dataset.in === "query" && value) query.set(dataset.name, value);
    else place = place.replace(`{${dataset.name}}`, encodeURIComponent(value).replaceAll("%2F", "/"));
  }
  const url = new URL(place, ROOT);
  if (url.origin !== ROOT.origin) throw new Error("That would go to another server.");
  url.search = query;
  const headers = {};
  if ($("key").value.trim()) headers.Authorization = `Bearer ${$("key").value.trim()}`;
  const options = { method: method.toUpperCase(), headers, cache: "no-store" };
  if (!$("body-label").hidden) {
    headers["Content-Type"] = "application/json";
    options.body = $("body").value;
  }
  return [url, options];
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function drawCurl() {
  const [url, { method, headers, body }] = request();
  const words = ["curl", "-X", method, quoted(url.href)];
  for (const name of Object.keys(headers)) {
    words.push("-H", quoted(`${name}: ${name === "Authorization" ? "Bearer KEY" : headers[name]}`));
  }
  if (body !== undefined) words.push("-d", quoted(body));
  $("curl").textContent = words.join(" ");
}

async function send() {
  const shown = $("response");
  const control = (running = new AbortController());
  const began = performance.now();
  $("send").hidden = true;
  $("stop").hidden = false;
  $("status").textContent = "Waiting…";
  shown.textContent = "";
  try {
    const [url, options] = request();
    const response = await fetch(url, { ...options, signal: control.signal });
    const kind = response.headers.get("Content-Type") ?? "";
    $("status").textContent = `HTTP ${response.status}`;
    const node = document.createTextNode("");
    shown.append(node);
    const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader?.read(); part && !part.done; part = await reader.read()) {
      node.appendData(part.value);
    }
    if (kind.includes("json")) node.data = indented(node.data);
    $("status").textContent = `HTTP ${response.status}, ${Math.round(performance.now() - began)} ms`;
  } catch (error) {
    $("status").textContent = control.signal.aborted ? "Stopped." : `No answer: ${error.message}`;
  }
  $("send").hidden = false;
  $("stop").hidden = true;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

async function start() {
  $("key").value = sessionStorage.getItem("jackfield.key") ?? "";
  openapi = await (await fetch(new URL("openapi.json", ROOT))).json();
  await findModel();
  for (const one of operations()) {
    const option = document.createElement("option");
    option.value = nameOf(one);
    option.textContent = `${one[0].toUpperCase()} ${one[1]}`;
    $("operation").append(option);
  }
  const wanted = new URLSearchParams(location.search).get("operation") ?? "post /v1/chat/completions";
  if (operations().some((one) => nameOf(one) === wanted)) $("operation").value = wanted;
  draw();
}

/** The served model's name, for bodies; none where the server wants a key first. */
async function findModel() {
  try {
    const key = $("key").value;
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(new URL("v1/models", ROOT), { headers });
    model = response.ok ? (await response.json()).data[0].id : null;
  } catch {
    model = null;
  }
}

$("operation").addEventListener("change", draw);
$("body").addEventListener("input", drawCurl);
$("key").addEventListener("change", async () => {
  sessionStorage.setItem("jackfield.key", $("key").value); // As the playground keeps it: in this tab.
  const before = model;
  await findModel();
  if (model !== before) draw();
});
$("request").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
start();
