"""One HTML file that holds a whole report: verdict, timelines, curves, tables. It works from disk, without a network.

from aorta.analysis.report.html.page_content import PAGE_FILE, write_page
write_page(datasets, summary, output / PAGE_FILE)
"""
