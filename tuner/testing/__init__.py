"""Contract test-suites that every device and every store passes."""
