"""What eventpump costs, beside azure-eventhub and beside its own budgets. README.md says what was learned."""
