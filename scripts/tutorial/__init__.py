"""The tutorial: notebooks in English and Chinese, what they are made from, and what checks a student's answers."""
