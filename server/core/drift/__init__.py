"""The loop that follows the drift: observe, ask a planner, decide, act, measure what came of it."""
