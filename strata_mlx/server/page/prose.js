// An answer as paragraphs and blocks of code, told apart by their fences of three backticks.

import { make, write } from "./dom.js";

// [{code, text}], the last of which may be unfinished.
export const parts = (text) => {
  const found = [{ code: false, text: "" }];
  for (const line of text.split("\n")) {
    const last = found.at(-1);
    if (!/^\s*```/.test(line)) last.text += `${line}\n`;
    else found.push({ code: !last.code, text: "" });
  }
  return found.map((part) => ({ ...part, text: part.text.replace(/^\n+|\s+$/g, "") })).filter((part) => part.text);
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
    write(part.code ? child.firstChild : child, part.text);
  });
  while (element.children.length > shown.length) element.lastChild.remove();
};
