// Before the first paint, so that a page in the dark never flashes in white.
(() => {
  const chosen = localStorage.getItem("ebbtide.theme");
  const wanted = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = chosen || wanted;
})();
