"""What a run's records say, for people: logs, the ledger of its time, the summary, the page. No torch, nothing of training."""
