"""What is kept: records, the volatile and the durable environment, recovery."""
