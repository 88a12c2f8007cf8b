// Elements, made without a way to put markup in them: text is always text.

export const find = (id) => document.getElementById(id);

// Children are elements or texts.
export const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

// Write only what changes, so that selections and screen readers are left in peace.
export const write = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

// Terms and their descriptions, one pair a row; rows of which the text is null are left out.
export const terms = (list, rows) => {
  const shown = rows.filter(([, text]) => text !== null).flatMap(([term, text]) => [["DT", term], ["DD", text]]);
  if (list.children.length !== shown.length) list.replaceChildren(...shown.map(([tag]) => make(tag)));
  shown.forEach(([, text], i) => write(list.children[i], text));
};
