// Light and dark theme: follows the system until the user chooses.

const KEY = "ebbtide.theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const followers = new Set();

export function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

/** Calls `redraw` when the theme changes, until `signal` aborts. Canvases read colours only when drawn. */
export function onTheme(redraw, signal) {
  followers.add(redraw);
  signal.addEventListener("abort", () => followers.delete(redraw));
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function startTheme(button) {
  const updateLabel = () => {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
  };
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    localStorage.setItem(KEY, next);
    put(next);
    updateLabel();
  });
  system.addEventListener("change", () => {
    if (!localStorage.getItem(KEY)) put(system.matches ? "dark" : "light");
    updateLabel();
  });
  updateLabel();
}

function put(theme) {
  document.documentElement.dataset.theme = theme;
  followers.forEach((redraw) => redraw());
}

/** Follows the system's theme, and prints in the light one. For pages without a theme button. */
export function followSystem() {
  const print = matchMedia("print");
  const update = () => put(system.matches && !print.matches ? "dark" : "light");
  for (const query of [system, print]) query.addEventListener("change", update);
  addEventListener("beforeprint", () => put("light"));
  addEventListener("afterprint", update);
  update();
}
