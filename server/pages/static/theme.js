// The theme that was chosen here last, before anything is drawn; without one, the system's.
"use strict";
try {
  const chosen = localStorage.getItem("embertide-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing has the system's theme.
}
