// Runs before the first paint, so that a dark page does not flash white.
(() => {
  const chosen = localStorage.getItem("ebbtide.theme");
  const wanted = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = chosen || wanted;
})();
