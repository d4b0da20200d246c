// Calls of the server that the page comes from.

import { $ } from "./base.js";

/** An error body of the server, or a connection that broke. */
export class Refused extends Error {
  constructor(message, { status, type, param } = {}) {
    super(message);
    this.status = status;
    this.facts = [status && `HTTP ${status}`, type, param && `field ${param}`].filter(Boolean);
  }
}

export function call(path, options = {}) {
  const key = $("key").value.trim();
  const headers = key ? { ...options.headers, Authorization: `Bearer ${key}` } : options.headers;
  return fetch(path, { ...options, headers, cache: "no-store" });
}

export async function refusal(response) {
  const text = await response.text();
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // A proxy's page, not the server's body.
  }
  const message = error.message ?? (text.slice(0, 300) || response.statusText);
  return new Refused(message, { ...error, status: response.status });
}

/** The JSON of each server-sent event, until [DONE]; frames of comments keep a connection open. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("The connection ended in the middle of the answer.");
    const frames = (pending + value).split("\n\n");
    pending = frames.pop();
    for (const frame of frames) {
      const line = frame.split("\n").find((one) => one.startsWith("data: "));
      if (!line) continue;
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message, event.error);
      yield event;
    }
  }
}
