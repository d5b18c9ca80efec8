"""Surveys, traces and measurements for the planner, which need torch."""
