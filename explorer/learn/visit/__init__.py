"""A learner on the page: where they are, what they answered and have done, and how the address and the browser keep it."""
