// CSV: text of rows, safe for spreadsheets, and downloads of files.

import { el } from "./dom.js";

const FORMULA = /^[=+\-@\t\r]/;

/**
 * Returns rows as CSV (RFC 4180). A text that a spreadsheet would run as a formula gets an apostrophe.
 * @param {(string | number | boolean | null | undefined)[][]} rows
 */
export function csvOf(rows) {
  return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return String(value);
  const text = FORMULA.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Formats a time of CSV files: 2026-11-22T21:49:12Z, or nothing. */
export function csvTime(atS) {
  return atS === null || atS === undefined ? "" : `${new Date(1000 * atS).toISOString().slice(0, 19)}Z`;
}

/**
 * Downloads a text as a file.
 * @param {string} name
 * @param {string} text
 * @param {string} [type]
 */
export function download(name, text, type = "text/csv") {
  downloadBlob(name, new Blob([text], { type: `${type};charset=utf-8` }));
}

/**
 * @param {string} name
 * @param {Blob} blob
 */
export function downloadBlob(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
