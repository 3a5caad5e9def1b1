// Runs before the first paint, so that a dark page does not flash white. Pages without theme.js follow the system, too.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => {
    const wanted = system.matches ? "dark" : "light";
    document.documentElement.dataset.theme = localStorage.getItem("ebbtide.theme") || wanted;
  };
  follow();
  system.addEventListener("change", follow);
})();
