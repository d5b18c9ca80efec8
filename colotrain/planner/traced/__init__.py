"""The planner's looks at a model, with torch."""
