// Pictures and recordings beside a message: chosen, dropped, pasted or spoken.

import { element } from "./base.js";

const SMALL = 2 << 20; // Bytes of a picture that is sent as it is.
const SIDE = 2048; // Pixels of a larger one's longer side.
const SENT = new Set(["image/png", "image/jpeg", "image/webp"]);
const RATE = 16_000; // Samples per second, as models of speech take them.
const SECONDS = 300; // Longest recording of the microphone.

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** A picture as a part of a message; a large one, or one of another format, drawn anew. */
async function picture(file) {
  if (SENT.has(file.type) && file.size <= SMALL) return imagePart(await dataUrl(file));
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = new OffscreenCanvas(
    Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale)),
  );
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // Behind what is transparent: JPEG has no transparency.
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return imagePart(await dataUrl(await canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 })));
}

const imagePart = (url) => ({ type: "image_url", image_url: { url } });

/** A recording in any format that the browser knows, as WAV of one channel. */
async function recording(file) {
  const decoder = new OfflineAudioContext(1, 1, RATE);
  const sound = await decoder.decodeAudioData(await file.arrayBuffer());
  const channels = Array.from({ length: sound.numberOfChannels }, (_, i) => sound.getChannelData(i));
  const url = await dataUrl(wav(sound.length, (i) => {
    let sum = 0;
    for (const channel of channels) sum += channel[i];
    return sum / channels.length;
  }));
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: "wav" } };
}

/** WAV of 16 bits. */
function wav(length, sample) {
  const view = new DataView(new ArrayBuffer(44 + 2 * length));
  const word = (at, text) => Array.from(text, (letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, 36 + 2 * length, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // Channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  word(36, "data");
  view.setUint32(40, 2 * length, true);
  for (let i = 0; i < length; i += 1) {
    view.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, sample(i))) * 32767, true);
  }
  return new Blob([view], { type: "audio/wav" });
}

/** The file of a recording, for routes that take one. */
export async function fileOf({ input_audio: { data } }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  return new File([bytes], "recording.wav", { type: "audio/wav" });
}

const KINDS = {
  image: { read: picture, noun: "pictures", type: "image_url" },
  audio: { read: recording, noun: "recordings", type: "input_audio" },
};

/** A part as the page shows it, or null for another kind. */
export function drawPart(part) {
  if (part.type === "image_url") {
    return element("img", { src: part.image_url.url, alt: "Attached picture" });
  }
  if (part.type === "input_audio") {
    const src = `data:audio/wav;base64,${part.input_audio.data}`;
    return element("audio", { src, controls: true, "aria-label": "Attached recording" });
  }
  return null;
}

/** What goes with the next message. `place`: where it is shown; `tell`: a line for the user. */
export class Attachments {
  parts = [];
  #takes = [];

  constructor(place, tell) {
    this.place = place;
    this.tell = tell;
  }

  /** The model has changed, and takes these kinds. */
  set takes(modalities) {
    this.#takes = modalities.filter((one) => one in KINDS);
    const kept = this.#takes.map((one) => KINDS[one].type);
    this.parts = this.parts.filter((part) => kept.includes(part.type));
    this.draw();
  }

  get takes() {
    return this.#takes;
  }

  async add(files) {
    for (const file of files) {
      const kind = file.type.split("/")[0];
      if (!this.#takes.includes(kind)) {
        this.tell(KINDS[kind]
          ? `This model takes no ${KINDS[kind].noun}.`
          : `${file.name} is neither a picture nor a recording.`);
        continue;
      }
      try {
        this.parts.push(await KINDS[kind].read(file));
        this.tell("");
      } catch {
        this.tell(`${file.name} cannot be read.`);
      }
    }
    this.draw();
  }

  draw() {
    this.place.replaceChildren(...this.parts.map((part) => {
      const button = element("button", { type: "button", className: "link", textContent: "Remove" });
      button.addEventListener("click", () => {
        this.parts.splice(this.parts.indexOf(part), 1);
        this.draw();
      });
      return element("figure", {}, drawPart(part), button);
    }));
  }

  take() {
    const parts = this.parts;
    this.parts = [];
    this.draw();
    return parts;
  }
}

/** The microphone: `ended` gets the recording's file. */
export class Microphone {
  #recorder = null;
  #timer = 0;

  constructor(changed, ended) {
    this.changed = changed;
    this.ended = ended;
  }

  get recording() {
    return this.#recorder !== null;
  }

  /** Begin. Throws where the browser or its user does not let us. */
  async start() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const pieces = [];
    const recorder = (this.#recorder = new MediaRecorder(stream));
    recorder.addEventListener("dataavailable", (event) => pieces.push(event.data));
    recorder.addEventListener("stop", () => {
      clearTimeout(this.#timer);
      for (const track of stream.getTracks()) track.stop();
      this.#recorder = null;
      this.changed();
      this.ended(new File(pieces, "The recording", { type: recorder.mimeType }));
    });
    recorder.start();
    this.#timer = setTimeout(() => this.stop(), SECONDS * 1000);
    this.changed();
  }

  stop() {
    this.#recorder?.stop();
  }
}
