"""The page of an explanation: one self-contained HTML file with the graph before and after, drawn by a layout of our own.

`fold` finds repeated layers, `model` says what is drawn, `layout` places it, `svg` draws it, `render` fills the template.
"""
