"""The app side: push inference jobs and read their replies. Start at ``producer.tasks``."""
