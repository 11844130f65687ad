// After a page is turned Streamlit's address is bare. This puts the settings back into the same history entry,
// so that "back" goes to the page before and not to a bare copy of this one.
let done = "";

export default function ({ data }) {
  if (!data.stamp || data.stamp === done) return;
  done = data.stamp;
  if (!window.location.search) window.history.replaceState(window.history.state, "", window.location.pathname + "?" + data.query);
}
