"""One Llama block as plans run it: what the lessons draw and let the learner build."""
