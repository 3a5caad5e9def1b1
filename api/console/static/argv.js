// A command line as a shell would take it apart: quotes and backslashes, and nothing else that shells do.

const SPECIAL = /^(\|\|?|&&?|;|[0-9]?>>?|<)$/;

/** What the person typed does not end; `message` says where. */
export class Unclosed extends Error {}

/** The words of `text`: '…' as it stands, "…" where \\ hides " and \\, and \\ elsewhere hides any character. */
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
      if (at + 1 === text.length) throw new Unclosed("it ends with a backslash that hides nothing");
      at += 1;
      word = (word ?? "") + text[at];
    } else if (/\s/.test(each)) {
      if (word !== null) found.push(word);
      word = null;
    } else word = (word ?? "") + each;
  }
  return word === null ? found : [...found, word];
}

/** What stands between the quote at `begin` and its like, and where that is. */
function quoted(text, begin) {
  const quote = text[begin];
  let inside = "";
  for (let at = begin + 1; at < text.length; at += 1) {
    if (text[at] === quote) return [inside, at];
    if (quote === '"' && text[at] === "\\" && ['"', "\\"].includes(text[at + 1])) at += 1;
    inside += text[at];
  }
  throw new Unclosed(`the ${quote} at character ${begin + 1} is never closed: ${text.slice(begin, begin + 20)}`);
}

/** Words that only a shell understands, of which there is none. */
export function forShells(argv) {
  return argv.filter((word) => SPECIAL.test(word) || /^\$[A-Za-z_{(]/.test(word));
}
