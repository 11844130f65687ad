"""Plans are run, and held against what was predicted: static rules, numbers on real ranks, traffic and memory."""
