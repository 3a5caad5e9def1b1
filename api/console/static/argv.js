// Splits a command line into words as a POSIX shell does: quotes and backslashes only, no expansion.

const SPECIAL = /^(\|\|?|&&?|;|[0-9]?>>?|<)$/;

/** A quote or backslash is not closed. */
export class Unclosed extends Error {}

/** Returns the words of `text`. '…' is literal; in "…" a backslash escapes " and \\; elsewhere any character. */
export function words(text) {
  const found = [];
  let word = null;
  for (let at = 0; at < text.length; at += 1) {
    const each = text[at];
    if (each === "'" || each === '"') {
      const [inside, end] = quoted(text, at);
      word = (word ?? "") + inside;
      at = end;
    } else if (each === "\\") {
      if (at + 1 === text.length) throw new Unclosed("it ends with a backslash");
      at += 1;
      word = (word ?? "") + text[at];
    } else if (/\s/.test(each)) {
      if (word !== null) found.push(word);
      word = null;
    } else word = (word ?? "") + each;
  }
  return word === null ? found : [...found, word];
}

/** Returns the text between the quote at `begin` and its closing quote, and the position of the latter. */
function quoted(text, begin) {
  const quote = text[begin];
  let inside = "";
  for (let at = begin + 1; at < text.length; at += 1) {
    if (text[at] === quote) return [inside, at];
    if (quote === '"' && text[at] === "\\" && ['"', "\\"].includes(text[at + 1])) at += 1;
    inside += text[at];
  }
  throw new Unclosed(`the ${quote} at character ${begin + 1} is not closed: ${text.slice(begin, begin + 20)}`);
}

/** Returns words with shell syntax. The command runs without a shell, so they would be passed literally. */
export function forShells(argv) {
  return argv.filter((word) => SPECIAL.test(word) || /^\$[A-Za-z_{(]/.test(word));
}
