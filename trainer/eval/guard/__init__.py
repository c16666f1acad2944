"""The guard: decides which published versions ordinary requests may see."""
