"""Which experts a token goes to, and with what weights: policy, selection with recovery, group plan."""
