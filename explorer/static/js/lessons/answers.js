// What a typed answer is worth, as explorer/learn/visit/answers.py says it on the page; here for files without a server.

const FAR = 10;
const ROUNDED = 0.03;
/** @type {Record<string, number>[]} */
const SCALES = [
  { b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30 },
  { s: 1, ms: 1e-3, us: 1e-6, µs: 1e-6, μs: 1e-6 },
  { times: 1, time: 1, x: 1, "×": 1, "%": 0.01, percent: 0.01, "per cent": 0.01 },
];
const NUMBER = "[-−]?\\d(?:[\\d.,\\s]*\\d)?";
const TYPED = new RegExp(`^[≈~]?\\s*(${NUMBER})(?:\\s*/\\s*(${NUMBER}))?\\s*([^\\d.,/]*)$`);
const PLAIN = /^\d+(?:[.,]\d+)?$/;
const GROUPS = /^\d{1,3}(?:,\d{3})+(?:\.\d+)?$/;
const GROUPS_BY_POINT = /^\d{1,3}(?:\.\d{3})+,\d+$/;

/** @param {string} text */
function plainOnes(text) {
  const sign = /^[-−]/.test(text) ? -1 : 1;
  const plain = text.replace(/^[-−]/, "").replace(/\s/g, "");
  const found = [];
  if (GROUPS.test(plain) && plain[0] !== "0") found.push(Number(plain.replaceAll(",", "")));
  if (GROUPS_BY_POINT.test(plain)) found.push(Number(plain.replaceAll(".", "").replace(",", ".")));
  if (PLAIN.test(plain)) found.push(Number(plain.replace(",", ".")));
  return found.map((x) => sign * x);
}

/**
 * What one of the typed unit is in the unit that was asked for.
 * @param {string} typed
 * @param {string} unit
 */
function scaleOf(typed, unit) {
  const told = typed.toLowerCase().trim().replace(/\s+/g, " ").replace(/\.$/, "");
  const asked = unit.toLowerCase();
  if (!told || told.replace(/s+$/, "") === asked.replace(/s+$/, "")) return 1;
  const both = SCALES.find((s) => told in s && asked in s);
  return both ? both[told] / both[asked] : null;
}

/**
 * What may have been meant, in `unit`; of `1,900` both readings, thousands first.
 * @param {string} text
 * @param {string} unit
 */
export function numbersIn(text, unit) {
  const found = TYPED.exec(text.trim());
  const scale = found && scaleOf(found[3], unit);
  if (!found || scale === null) return [];
  const below = found[2] ? plainOnes(found[2]) : [1];
  return plainOnes(found[1]).flatMap((a) => below.filter(Boolean).map((b) => (a / b) * scale));
}

/**
 * The option that was typed and what is said to it; null and a hint where it is none of those that were expected.
 * @param {import("../types").Asked} question
 * @param {string} text
 * @returns {[number | null, string]}
 */
export function judged(question, text) {
  const meant = numbersIn(text, question.unit);
  if (!meant.length) {
    const unit = question.unit ? ` of ${question.unit}` : "";
    return [null, `“${text.slice(0, 20)}” is not a number${unit}; type one such as 12, 1.5 or 5/4.`];
  }
  /** @type {(a: number, b: number) => boolean} */
  const near = (a, b) => Math.abs(a - b) <= ROUNDED * Math.max(Math.abs(a), Math.abs(b));
  const close = meant.flatMap((value) => question.values.flatMap((other, i) => (near(value, other) ? [i] : [])));
  if (close.length) {
    const best = close.includes(question.answer) ? question.answer : close[0];
    return [best, question.why[best]];
  }
  const right = question.values[question.answer];
  if (meant[0] <= 0 || right <= 0) return [null, meant[0] < right ? "It is more than that." : "It is less than that."];
  const ratio = meant[0] / right;
  const side = ratio > 1 ? "large" : "small";
  const off = Math.max(ratio, 1 / ratio);
  if (off > FAR)
    return [null, `Too ${side}, and of another order: look at the units, and at what is counted once and what again.`];
  if (off < 1.25) return [null, `Close, a little too ${side}. Two figures are enough, but they must be right.`];
  return [null, `Too ${side}. Go through the sentence once more: what is sent or computed, and how often?`];
}
