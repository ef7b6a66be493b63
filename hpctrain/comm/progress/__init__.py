"""Operations as steps, and what moves them: lanes, the order of launches, the records of each."""
