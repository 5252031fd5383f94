"""Starting the ranks of a job, joining their process group, and looking at them: the ``paceline`` command."""
