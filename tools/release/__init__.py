"""What a release consists of (docs/releasing.md): ``chart.py`` packs the chart, ``__main__.py`` makes everything."""
