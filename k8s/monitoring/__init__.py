"""Dashboards, rules and the page of alerts, made from one description: `make monitoring`."""
