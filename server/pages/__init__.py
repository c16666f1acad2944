"""The look of every page of ours: style sheets, charts and components.

rendering.py  templates, in which names are text, and filters for figures
static/       style sheet, theme and charts; third-party files in LICENCES.txt
templates/    components: tables, tiles, states
"""
