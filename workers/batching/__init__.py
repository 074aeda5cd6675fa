"""Pure decisions about batches: what shares one, how it splits, why it closes, what follows it."""
