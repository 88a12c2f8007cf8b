// Numbers as people read them. Units are decimal, as everywhere in strata-mlx.

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(Math.round(value));

export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;

// Three digits, or more where there are more before the point.
export const number = (value) => {
  if (value >= 1000) return count(value);
  return value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);
};

const UNITS = ["B", "KB", "MB", "GB", "TB"];

// [amount, unit]
export const bytesApart = (bytes) => {
  let unit = 0;
  while (bytes >= 999.5 && unit < UNITS.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return [unit ? number(bytes) : count(bytes), UNITS[unit]];
};

export const bytes = (value) => bytesApart(value).join(" ");

export const seconds = (value) => {
  if (value < 0.9995) return `${Math.round(1000 * value)} ms`;
  if (value < 120) return `${number(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min`;
  return `${count(minutes / 60)} h`;
};
