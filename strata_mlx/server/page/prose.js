// An answer as paragraphs and code: of Markdown, fences, `code` and **weight** are shown, and the rest as it is written.

import { make, write } from "./dom.js";

const sources = new WeakMap(); // by paragraph, the text that it shows

// Whether most lines are indented: models that go on with code put no fences around it.
const isCode = (text) => {
  const lines = text.split("\n").filter((line) => line.trim());
  return lines.length > 1 && 2 * lines.filter((line) => /^( {4}|\t)/.test(line)).length >= lines.length;
};

// [{code, text}], the last of which may be unfinished.
export const parts = (text) => {
  if (!text.includes("```") && isCode(text)) return [{ code: true, text: text.trimEnd() }];
  const found = [{ code: false, text: "" }];
  for (const line of text.split("\n")) {
    const last = found.at(-1);
    if (!/^\s*```/.test(line)) last.text += `${line}\n`;
    else found.push({ code: !last.code, text: "" });
  }
  return found.map((part) => ({ ...part, text: part.text.replace(/^\n+|\s+$/g, "") })).filter((part) => part.text);
};

const paragraph = (element, text) => {
  if (sources.get(element) === text) return;
  sources.set(element, text);
  const pieces = text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((piece, i) => {
    if (i % 2 === 0) return piece;
    return piece[0] === "`" ? make("code", {}, piece.slice(1, -1)) : make("strong", {}, piece.slice(2, -2));
  });
  element.replaceChildren(...pieces);
};

// Brings ``element`` up to date; what has not changed stays as it is.
export const show = (element, text) => {
  const shown = parts(text);
  shown.forEach((part, i) => {
    let child = element.children[i];
    if (!child || (child.tagName === "PRE") !== part.code) {
      const fresh = part.code ? make("pre", { tabindex: "0" }, make("code")) : make("div", { class: "prose" });
      if (child) child.replaceWith(fresh);
      else element.append(fresh);
      child = fresh;
    }
    if (part.code) write(child.firstChild, part.text);
    else paragraph(child, part.text);
  });
  while (element.children.length > shown.length) element.lastChild.remove();
};
