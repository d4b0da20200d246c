// Markdown as models write it, drawn with elements and text nodes: nothing in it becomes HTML, no
// picture is fetched, and links lead to http, https and mailto alone. Every search is bounded, so
// that a hostile text costs time in proportion to its length.

const FAR = 1000; // Characters within which a mark must end.
const DEEP = 6; // Lists and quotes within each other.
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const ESCAPED = /[!-/:-@[-`{-~]/;
const SAFE = /^(?:https?:\/\/|mailto:)/i;

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** A text that grows; what is complete is drawn once. */
export class Markdown {
  #tail = "";
  #nodes = [];
  #changed = false;
  #next = 0;

  constructor(root) {
    this.root = root;
  }

  append(text) {
    this.#tail += text;
    this.#changed = true;
  }

  /** Draw what has been added; less often where it takes long, unless it is the `last` time. */
  draw(last = false) {
    const began = performance.now();
    if (!this.#changed || (began < this.#next && !last)) return;
    this.#changed = false;
    for (const node of this.#nodes) node.remove();
    const end = complete(this.#tail);
    this.root.append(...blocks(this.#tail.slice(0, end).split("\n"), 0));
    this.#tail = this.#tail.slice(end);
    this.#nodes = blocks(this.#tail.split("\n"), 0);
    this.root.append(...this.#nodes);
    const now = performance.now();
    this.#next = now + 9 * (now - began);
  }
}

/** Where the last block begins that may still change. */
function complete(text) {
  let fence = "";
  let blank = false;
  let end = 0;
  let at = 0;
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1];
    if (!fence && blank && line && !/^\s/.test(line) && !ITEM.test(line)) end = at;
    if (fence) fence = closes(line, fence) ? "" : fence;
    else if (mark) fence = mark;
    blank = !line.trim();
    at += line.length + 1;
  }
  return end;
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

// ---------------------------------------------------------------- blocks

const ruled = (line) => {
  const marks = line.replaceAll(" ", "");
  return marks.length > 2 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
};
const begins = (line) =>
  FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || line.startsWith(">") || ruled(line);

function blocks(lines, depth) {
  const made = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      i += 1;
    } else if (fence) {
      const code = [];
      for (i += 1; i < lines.length && !closes(lines[i], fence[1]); i += 1) code.push(lines[i]);
      i += 1;
      made.push(codeBlock(code.join("\n"), fence[2]));
    } else if (heading) {
      const text = line.slice(heading[0].length).trim();
      made.push(element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(text)));
      i += 1;
    } else if (ruled(line)) {
      made.push(element("hr"));
      i += 1;
    } else if (line.startsWith(">") && depth < DEEP) {
      const inner = [];
      for (; i < lines.length && lines[i].startsWith(">"); i += 1) {
        inner.push(lines[i].slice(lines[i][1] === " " ? 2 : 1));
      }
      made.push(element("blockquote", {}, ...blocks(inner, depth + 1)));
    } else if (ITEM.test(line) && depth < DEEP) {
      const [list, next] = listFrom(lines, i, depth);
      made.push(list);
      i = next;
    } else if (line.includes("|") && aligned(lines[i + 1])) {
      const [table, next] = tableFrom(lines, i);
      made.push(table);
      i = next;
    } else {
      const text = [line];
      for (i += 1; i < lines.length && lines[i].trim() && !begins(lines[i]); i += 1) {
        text.push(lines[i]);
      }
      made.push(element("p", {}, ...inline(text.join("\n").trim())));
    }
  }
  return made;
}

function listFrom(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const ordered = !"-*+".includes(mark);
  const list = element(ordered ? "ol" : "ul");
  if (ordered) list.start = Number.parseInt(mark, 10);
  let i = start;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    const same = item && item[1].length <= indent.length + 1 && !"-*+".includes(item[2]) === ordered;
    if (!same || ruled(lines[i])) break;
    const inner = [lines[i].slice(item[0].length)];
    for (i += 1; i < lines.length; i += 1) {
      const line = lines[i];
      const within = line.search(/\S/) >= item[1].length + 2;
      const blank = !line.trim();
      const lazy = !blank && !begins(line) && inner.at(-1).trim();
      if (!within && !blank && !lazy) break;
      inner.push(line.slice(Math.min(item[0].length, Math.max(0, line.search(/\S/)))));
    }
    list.append(element("li", {}, ...blocks(inner, depth + 1)));
  }
  return [list, i];
}

const aligned = (line) => /^[ |:-]+$/.test(line ?? "") && line.includes("-") && line.includes("|");

function cells(line) {
  const parts = line.trim().split(/(?<!\\)\|/);
  if (!parts[0].trim()) parts.shift();
  if (parts.length && !parts.at(-1).trim()) parts.pop();
  return parts.map((part) => part.trim().replaceAll("\\|", "|"));
}

function tableFrom(lines, start) {
  const row = (tag, line) =>
    element("tr", {}, ...cells(line).map((text) => element(tag, {}, ...inline(text))));
  const body = element("tbody");
  const head = element("thead", {}, row("th", lines[start]));
  let i = start + 2;
  for (; i < lines.length && lines[i].includes("|"); i += 1) body.append(row("td", lines[i]));
  return [element("div", { className: "table" }, element("table", {}, head, body)), i];
}

function codeBlock(text, language) {
  const button = element("button", { type: "button", className: "link copy", textContent: "Copy" });
  const code = element("code", { textContent: text });
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text, code)) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  const head = element("header", {}, element("span", { textContent: language.slice(0, 40) }), button);
  return element("div", { className: "codeblock" }, head, element("pre", { tabIndex: 0 }, code));
}

/** Put a text into the clipboard, which pages without TLS reach only through a selection. */
async function copied(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(shown);
    return document.execCommand("copy");
  }
}

// ---------------------------------------------------------------- within a line

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

function inline(text, depth = 0) {
  const made = [];
  const unclosed = new Set(); // Marks that do not end in this text: looked for once.
  let plain = "";
  let i = 0;
  const add = (node, next) => {
    if (plain) made.push(document.createTextNode(plain));
    plain = "";
    made.push(node);
    i = next;
  };
  while (i < text.length) {
    const letter = text[i];
    if (letter === "\\" && ESCAPED.test(text[i + 1] ?? "")) {
      plain += text[i + 1];
      i += 2;
      continue;
    }
    if (letter === "`") {
      const mark = /^`+/.exec(text.slice(i, i + 100))[0];
      const end = unclosed.has(mark) ? -1 : text.indexOf(mark, i + mark.length);
      if (end > 0 && end - i < FAR) {
        add(element("code", { textContent: text.slice(i + mark.length, end).trim() }), end + mark.length);
        continue;
      }
      unclosed.add(mark);
      plain += mark;
      i += mark.length;
      continue;
    }
    if (letter === "[" || (letter === "!" && text[i + 1] === "[")) {
      const link = linkAt(text, letter === "!" ? i + 1 : i, depth);
      if (link) {
        add(...link);
        continue;
      }
    }
    if (letter === "h" && !/\w/.test(text[i - 1] ?? "") && /^https?:\/\//.test(text.slice(i, i + 8))) {
      const url = /^[^\s<>"'`)\]]+/.exec(text.slice(i, i + FAR))[0].replace(/[.,;:!?*_]$/, "");
      add(anchor(url, [url]), i + url.length);
      continue;
    }
    const mark = depth < DEEP && MARKS.find(([mark]) => text.startsWith(mark, i));
    if (mark) {
      const end = unclosed.has(mark[0]) ? -1 : endOf(text, mark[0], i);
      if (end > 0) {
        const inner = text.slice(i + mark[0].length, end);
        add(element(mark[1], {}, ...inline(inner, depth + 1)), end + mark[0].length);
        continue;
      }
      if (end < 0) unclosed.add(mark[0]);
      plain += mark[0];
      i += mark[0].length;
      continue;
    }
    plain += letter;
    i += 1;
  }
  if (plain) made.push(document.createTextNode(plain));
  return made;
}

/** Where the mark that opens at `start` ends; 0 if it opens nothing, -1 if it does not end. */
function endOf(text, mark, start) {
  const word = (at) => /\w/.test(text[at] ?? "");
  const after = start + mark.length;
  if (!text[after]?.trim() || (mark[0] === "_" && word(start - 1))) return 0;
  for (let end = text.indexOf(mark, after + 1); end > 0; end = text.indexOf(mark, end + 1)) {
    if (end - start > FAR) return 0;
    const whole = mark.length > 1 || (text[end + 1] !== mark && text[end - 1] !== mark);
    const closing = text[end - 1].trim() && !(mark[0] === "_" && word(end + mark.length));
    if (whole && closing) return end;
  }
  return -1;
}

function linkAt(text, start, depth) {
  const middle = text.slice(start, start + FAR).indexOf("](");
  if (middle < 0) return null;
  const from = start + middle + 2;
  const length = text.slice(from, from + FAR).search(/[\s)]/);
  if (length < 0 || text[from + length] !== ")") return null;
  const label = text.slice(start + 1, start + middle);
  if (label.includes("[")) return null;
  const url = text.slice(from, from + length);
  return [anchor(url, depth < DEEP ? inline(label || url, depth + 1) : [label]), from + length + 1];
}

/** A link, or its text alone where it would lead elsewhere than to a page or an address. */
function anchor(url, children) {
  if (!SAFE.test(url)) return element("span", { title: url }, ...children);
  return element(
    "a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children
  );
}
