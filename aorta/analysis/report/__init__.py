"""What people read of a summary: the text of the terminal, pictures (`charts`), and one HTML page (`html`).

`report_command` is the command line, `report_folder` writes a report. Nothing else in the analysis
imports this package.
"""
