// After a page is turned Streamlit's address is bare. This puts the settings back into the same history entry,
// so that "back" goes to the page before and not to a bare copy of this one.

import { keepFocus } from "./focus.js";

let done = "";

/** @param {import("./types").Component<{ query: string, stamp: string }>} component */
export default function ({ data }) {
  keepFocus(); // here, since this is on every page
  if (!data.stamp || data.stamp === done) return;
  done = data.stamp;
  const { history, location } = window;
  if (!location.search) history.replaceState(history.state, "", `${location.pathname}?${data.query}`);
}
