// What every part of the page uses: elements, storage, words.

export const $ = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function stored(area, name, value) {
  try {
    if (value === undefined) return area().getItem(name) ?? "";
    if (value) area().setItem(name, value);
    else area().removeItem(name);
  } catch {
    // A browser that keeps nothing: the page works, and forgets.
  }
  return "";
}
export const inTab = (name, value) => stored(() => sessionStorage, `jackfield.${name}`, value);
export const inBrowser = (name, value) => stored(() => localStorage, `jackfield.${name}`, value);

export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
