"""Tables and pictures from run directories: report.html and report/*.png. Nothing heavy is imported before it is needed."""
