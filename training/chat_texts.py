"""The longer words, sentences and paragraphs of `chat_prompts`, a list a kind."""

from __future__ import annotations

from forerun.training.chat_words import split_words

TEXTS: dict[str, list[str]] = {
    "phrase": split_words(
        """
        I am very tired; that is a great idea; I do not understand; let us meet tomorrow; it was
        nice to see you; please be careful; the food was excellent; I changed my mind; thank you
        for your help; we need more time; this is too expensive; good luck; I am sorry
        """
    ),
    "adjective": split_words(
        """
        brave; fragile; ambiguous; generous; meticulous; ancient; humble; vivid; eager;
        reluctant; abundant; scarce; resilient; curious; obsolete; candid; serene; stubborn;
        subtle; diligent; gloomy; concise; authentic; rigid; gentle; famous; elegant;
        spontaneous; tedious
        """
    ),
    "review": split_words(
        """
        The room was clean, but the staff ignored us and breakfast was cold.; I love this lamp,
        it is bright and it arrived a day early!; The film was fine, though far too long.;
        Honestly, this is the worst phone that I ever owned.; hey, can u send me the file asap?
        thx; The course was well structured and the teacher answered every question.; Your
        service is a joke, I waited two hours and nobody came.; The soup was okay, nothing
        special.; we gotta talk about the budget, it's a mess; I can't make it tonight,
        something came up.; Best concert of my life, the band played every song that I hoped
        for.; The app crashes whenever I open the map, and support never replied.; This book
        made me laugh and cry, and the ending is perfect.; Not bad for the price, but it
        scratches.; The hike was exhausting and it rained, yet the view was worth every step.;
        I'm quitting, this job is driving me crazy.; The new office is bright, quiet and close
        to home.
        """
    ),
    "broken": split_words(
        """
        she go to school every day and dont like it; their are many reason why peoples travel;
        me and him was late becuase the bus dont come; i has three cat and they is very
        playfull; The childrens plays in the garden while it rain; Yesterday I go to the shop
        and buyed milk; he dont know nothing about the meeting; Its a beautifull day and the
        birds is singing; We was happy too see you're new house; Everyone have they own opinion
        about this movie; The manager ask the team for finish the report; I am live in this city
        since ten years
        """
    ),
    "passage": split_words(
        """
        Maria Santos opened her bakery in Lisbon in March 2015. Within two years she sold 400
        loaves a day and hired six people. She now plans a second shop near the river.; Bees
        visit up to five thousand flowers a day. While they gather nectar they carry pollen from
        plant to plant, and about a third of our food depends on that work. Pesticides and the
        loss of meadows have made their numbers fall in many countries.; The town council
        decided on Monday to close the main street to cars for the summer. Shop owners fear
        fewer customers, while parents welcome the safer way to school. A final vote is due in
        October.; Tom moved from Chicago to Denver on 3 June to work for a solar company. He
        misses the lake, but he enjoys the mountains and has already joined a climbing club.;
        Sleep has several stages. During deep sleep the body repairs tissue, and during dream
        sleep the brain sorts memories. Adults who sleep less than six hours for weeks react
        more slowly and catch colds more often.; The company earned 12 million dollars in 2021,
        3 million more than the year before. Most of the growth came from its online shop, which
        now makes up 60 percent of sales.; A storm hit the coast on Tuesday night. Winds of 120
        kilometres an hour took down power lines, and 8,000 homes were without electricity until
        the morning. No one was injured.; The old bridge was built in 1889 by the engineer Clara
        Hoffmann. It carried trains for seventy years before it became a path for walkers and
        cyclists.; Dear all, the meeting on Thursday moves to 3 pm in room 204, because Mr.
        Okafor arrives late from Lagos. Please bring the sales figures and a short list of open
        questions.; Rice was first grown in the valley of the Yangtze some nine thousand years
        ago. From there it spread to India and later to Europe. Today it feeds more than half of
        the people on Earth.; Our library lends more than books. Members can borrow drills,
        sewing machines and even a tent for two weeks. The most popular item last year was a
        telescope, with 85 loans.; Batteries store energy in chemical form. When a device is
        switched on, ions move from one side to the other and electrons flow through the
        circuit. Charging reverses the process.; Aisha, who is 34, trained as a nurse in
        Manchester and now teaches first aid in villages in Ghana. Since 2018 she has taught
        1,200 people, many of whom now teach others.; Coral reefs cover less than one percent of
        the sea floor, yet a quarter of all sea animals live there. Warm water makes corals lose
        the algae that feed them, and they turn white.; The museum shows 150 photographs by Erik
        Lund until 15 January. He walked along the Norwegian coast for a year and took one
        picture every day at noon. Admission is free on Sundays.
        """
    ),
}
